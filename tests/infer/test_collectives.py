"""Collectives of a compiled program: found, weighed, and counted as often as loops turn. test_mesh.py counts those of real programs."""

from dflax.infer.collectives import collectives

REDUCE = "%r = f32[8]{0} all-reduce(f32[8]{0} %x), replica_groups={}"


def test_collectives_are_found_and_weighed():
    text = """
      %all-reduce.1 = f32[8,128]{1,0} all-reduce(f32[8,128]{1,0} %x), replica_groups={}
      %ag = (bf16[4]{0}, bf16[16]{0}) all-gather-start(bf16[4]{0} %y), dimensions={0}
      %agd = bf16[16]{0} all-gather-done(%ag)
      %two = (f32[2]{0}, s32[3]{0}) all-reduce(f32[2]{0} %a, s32[3]{0} %b)
    """
    assert collectives(text) == {"all-reduce": (2, 8 * 128 * 4 + 5 * 4), "all-gather": (1, 32)}
    combined = """
      %a = (f32[1024]{0}, f32[2048]{0}) all-reduce-start(f32[1024]{0} %x, f32[2048]{0} %y)
      %b = ((f32[4]{0}, f32[8]{0}), (f32[16]{0}, f32[32]{0})) all-gather-start(f32[4]{0} %x, f32[8]{0} %y)
    """
    assert collectives(combined) == {"all-reduce": (1, 4 * 3072), "all-gather": (1, 4 * 48)}
    assert collectives("") == {}


def program(*called: str, main: str) -> str:
    return "\n\n".join(["HloModule jit_f", *called, f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  {main}\n}}"])


def computation(name: str, *lines: str) -> str:
    return f"%{name} (p: (s32[], f32[8])) -> (s32[], f32[8]) {{\n" + "\n".join(f"  {line}" for line in lines) + "\n}"


def loop(condition: str, body: str, known: str = "") -> str:
    return f"%w = (s32[], f32[8]) while(%t), condition=%{condition}, body=%{body}{known}"


def test_loops_in_loops_multiply_and_those_of_unknown_length_count_once():
    known = ', backend_config={"known_init_step":{"init":"0"},"known_trip_count":{"n":"5"}}'
    counted = computation(
        "tpu", "%c.1 = s32[]{:T(128)} constant(7)", "ROOT %lt = pred[] compare(%i, %c.1), direction=LT"
    )
    unknown = computation("ask", "%c.1 = s32[] constant(7)", "ROOT %and = pred[] and(%lt, %d)")
    text = program(
        computation("inner", REDUCE), computation("middle", loop("ask", "inner", known)), counted, unknown,
        computation("outer", loop("tpu", "middle"), REDUCE), main=f"{loop('ask', 'outer')}\n  {REDUCE}",
    )  # fmt: skip
    count = 7 * 5 + 1 + 1
    assert collectives(text) == {"all-reduce": (count, count * 32)}


def test_branches_and_fusions_are_followed():
    branches = computation("a", REDUCE), computation("b", "%call = f32[8] call(%x), to_apply=%a"), computation("c")
    text = program(*branches, main="%k = f32[8] conditional(%i, %x, %x, %x), branch_computations={%a, %b, %c}")
    assert collectives(text) == {"all-reduce": (2, 64)}


def test_what_is_written_for_its_start_its_cover_and_its_end_counts_once():
    gather = '%g = bf16[64]{0} all-gather(%p), dimensions={0}, frontend_attributes={chain_id="6"}'
    text = program(
        computation("start", gather, 'ROOT %s = (bf16[64]) custom-call(%g), custom_call_target="AsyncCollectiveStart"'),
        computation("cover", gather),
        computation("end", gather, 'ROOT %d = bf16[64] custom-call(%g), custom_call_target="AsyncCollectiveDone"'),
        computation("wrapped", REDUCE),
        main="\n  ".join([
            "%a = f32[8] fusion(%x), calls=%start", "%b = f32[8] fusion(%a), calls=%cover", "%c = f32[8] fusion(%b), calls=%end",
            "%d = ((f32[8]), f32[8]) async-start(%x), calls=%wrapped", "%e = f32[8] async-done(%d), calls=%wrapped",
        ]),
    )  # fmt: skip
    assert collectives(text) == {"all-gather": (1, 128), "all-reduce": (1, 32)}
