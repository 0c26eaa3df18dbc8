"""Hugging Face `generate` on the prompts of a bench, as the yardstick for our own plain decoding.

Runs in an environment of its own (pip install torch transformers); dflax itself never needs torch.

    dflax export smollm2-135m /tmp/smollm2                                       # the same weights as a Hugging Face folder
    dflax bench --target smollm2-135m ... --dump-prompts /tmp/prompts.jsonl      # the same prompts
    python tools/hf_baseline.py /tmp/smollm2 /tmp/prompts.jsonl /tmp/hf.json --threads 2
    dflax bench --target smollm2-135m ... --baseline /tmp/hf.json
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Notes when the first new token came: what follows is decoding, what went before is prefill."""

    def __init__(self):
        self.calls, self.at = 0, 0.0

    def put(self, value):
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.at = time.perf_counter()

    def end(self):
        pass


def respond(model, row):
    """Greedy response to one prompt: (new tokens, prefill seconds, decode seconds)."""
    tokens = torch.tensor([row["prompt_tokens"]])
    first = FirstToken()
    begin = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=row["max_new_tokens"],
            eos_token_id=row["stop_token_ids"] or None, pad_token_id=0, streamer=first,
        )  # fmt: skip
    end = time.perf_counter()
    return out[0, tokens.shape[1] :].tolist(), first.at - begin, end - first.at


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder or hub id")
    parser.add_argument("prompts", type=Path, help="written by dflax bench --dump-prompts")
    parser.add_argument("out", type=Path, help="JSON for dflax bench --baseline")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: what torch takes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=None, help="prompts per set, the first ones")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    rows = [row for row in rows if args.limit is None or row["index"] < args.limit]
    respond(model, {**rows[0], "max_new_tokens": 16})  # warm-up
    results = []
    for row in rows:
        tokens, prefill, decode = respond(model, row)
        results.append(
            {
                "set": row["set"],
                "index": row["index"],
                "tokens": tokens,
                "prefill_seconds": prefill,
                "decode_seconds": decode,
            }
        )
        print(f"{row['set']} {row['index']}: {(len(tokens) - 1) / decode:.1f} tokens/s", flush=True)
    name = f"transformers {transformers.__version__} generate ({args.dtype})"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    data = {
        "name": name,
        "model": args.model,
        "threads": torch.get_num_threads(),
        "versions": versions,
        "rows": results,
    }
    args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
