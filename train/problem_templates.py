"""The templates of train/problems.py: what is trained on, and what is kept for tests.

Slots: N, M names; I, J objects; C, D containers; x, y, z, w small numbers; a, b, c large ones. Their words are few on purpose: all of them
with digits and signs make a vocabulary of at most 128 tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """`question` and the sentences of the answer; `{a}` is a number, `{N}` a name, and `[p = x * y]` one step of the computation."""

    theme: str
    question: str
    steps: tuple[str, ...]


TRAINING = (
    # --- boxes of things
    Template(
        "boxes",
        "{N} has {a} {I}. {N} buys {x} {C} of {y} {I}. How many {I} does {N} have?",
        ("The {C} hold [p = x * y] {I}.", "{N} has [q = a + p] {I}."),
    ),
    Template(
        "boxes",
        "{N} buys {x} {C} of {y} {I} and {z} {D} of {w} {I}. How many {I} does {N} have in all?",
        ("The {C} hold [p = x * y] {I}.", "The {D} hold [q = z * w] {I}.", "In all {N} has [r = p + q] {I}."),
    ),
    Template(
        "boxes",
        "{N} has {x} {C} of {y} {I}. {N} gives {a} {I} to {M}. How many {I} are left?",
        ("The {C} hold [p = x * y] {I}.", "{N} gives {a} to {M}, so [q = p - a] {I} are left."),
    ),
    Template(
        "boxes",
        "{N} has {a} {I} and buys {x} {C} of {y} {I}. Then {N} gives {b} {I} to {M} and finds {z} more. "
        "How many {I} does {N} have now?",
        (
            "The {C} hold [p = x * y] {I}.",
            "With the first {a} {I} {N} has [q = a + p] {I}.",
            "{N} gives {b} to {M}, so [r = q - b] {I} are left.",
            "{N} finds {z} more, so now {N} has [s = r + z] {I}.",
        ),
    ),
    Template(
        "boxes",
        "{N} has {a} {I} and {M} has {b} {I}. They have {x} {C} for all {I}. How many {I} are in each of the {C}?",
        ("In all they have [p = a + b] {I}.", "In each of the {x} {C} are [q = p / x] {I}."),
    ),
    Template(
        "boxes",
        "There are {x} {C} with {y} {I} and {z} {J} in each. How many {I} and {J} are there in all?",
        ("The {C} hold [p = x * y] {I}.", "The {C} hold [q = x * z] {J}.", "In all there are [r = p + q] {I} and {J}."),
    ),
    Template(
        "boxes",
        "{N} buys {x} {C} of {y} {I}. {M} buys {z} {C} of {w} {I}. How many more {I} does {N} have than {M}?",
        ("{N} has [p = x * y] {I}.", "{M} has [q = z * w] {I}.", "{N} has [r = p - q] more {I} than {M}."),
    ),
    Template(
        "boxes",
        "{N} has {a} {I}. {N} gives {b} {I} to {M} and puts the rest in {x} {C}. How many {I} are in each of the {C}?",
        ("{N} gives {b} to {M}, so [p = a - b] {I} are left.", "In each of the {x} {C} are [q = p / x] {I}."),
    ),
    Template(
        "boxes",
        "{N} buys {x} {C} of {y} {I}. {N} loses {z} {I} and shares the rest with {w} friends. "
        "How many {I} does each friend get?",
        (
            "The {C} hold [p = x * y] {I}.",
            "{N} loses {z}, so [q = p - z] {I} are left.",
            "Each friend gets [r = q / w] {I}.",
        ),
    ),
    # --- money
    Template(
        "money",
        "The {I} cost {x} dollars each. {N} buys {y} {I} and has {a} dollars. How many dollars are left?",
        ("The {I} cost [p = x * y] dollars.", "So [q = a - p] dollars are left."),
    ),
    Template(
        "money",
        "The {I} cost {x} dollars and the {J} cost {y} dollars each. {N} buys {z} {I} and {w} {J}. "
        "How many dollars does {N} pay?",
        (
            "The {I} cost [p = x * z] dollars.",
            "The {J} cost [q = y * w] dollars.",
            "In all {N} pays [r = p + q] dollars.",
        ),
    ),
    Template(
        "money",
        "{N} has {a} dollars. {N} buys {x} {C} of {I} at {y} dollars each. {M} gives {N} {b} dollars. "
        "How many dollars does {N} have now?",
        (
            "The {C} cost [p = x * y] dollars.",
            "Then [q = a - p] dollars are left.",
            "{M} gives {b}, so now {N} has [r = q + b] dollars.",
        ),
    ),
    Template(
        "money",
        "{N} sells {x} {I} at {y} dollars each and {z} {J} at {w} dollars each. {N} pays {a} dollars for the {C}. "
        "How many dollars are left?",
        (
            "{N} gets [p = x * y] dollars for the {I}.",
            "{N} gets [q = z * w] dollars for the {J}.",
            "In all {N} gets [r = p + q] dollars.",
            "{N} pays {a}, so [s = r - a] dollars are left.",
        ),
    ),
    Template(
        "money",
        "{N} works {x} hours a day and gets {y} dollars for each hour. {N} has {a} dollars. "
        "How many dollars does {N} have after a day?",
        ("In a day {N} gets [p = x * y] dollars.", "With the first {a} dollars {N} has [q = a + p] dollars."),
    ),
    Template(
        "money",
        "{N} works {x} hours and {M} works {y} hours. Each gets {z} dollars for each hour. "
        "How many dollars do they get in all?",
        ("In all there are [p = x + y] hours.", "In all they get [q = p * z] dollars."),
    ),
    Template(
        "money",
        "{N} gets {x} dollars each day for {y} days. Then {N} pays {z} dollars each for {w} {I}. "
        "How many dollars are left?",
        (
            "In {y} days {N} gets [p = x * y] dollars.",
            "The {I} cost [q = z * w] dollars.",
            "So [r = p - q] dollars are left.",
        ),
    ),
    Template(
        "money",
        "{N} has {a} dollars and {M} has {b} dollars. They pay all dollars for {I} at {x} dollars each. "
        "How many {I} do they get?",
        ("In all they have [p = a + b] dollars.", "With {x} dollars for each they get [q = p / x] {I}."),
    ),
    Template(
        "money",
        "{N} has {a} dollars. {N} buys {x} {I} and has {b} dollars left. How many dollars does {N} pay for each?",
        ("The {I} cost [p = a - b] dollars.", "{N} pays [q = p / x] dollars for each."),
    ),
    # --- days and hours
    Template(
        "days",
        "{N} finds {x} {I} each day for {y} days. {M} finds {z} {I} each day for {w} days. "
        "How many {I} do they have in all?",
        ("{N} finds [p = x * y] {I}.", "{M} finds [q = z * w] {I}.", "In all they have [r = p + q] {I}."),
    ),
    Template(
        "days",
        "{N} has {a} {I}. {N} makes {x} more each day for {y} days and sells {b}. How many {I} are left?",
        (
            "In {y} days {N} makes [p = x * y] {I}.",
            "With the first {a} {I} {N} has [q = a + p] {I}.",
            "{N} sells {b}, so [r = q - b] {I} are left.",
        ),
    ),
    Template(
        "days",
        "{N} walks {x} miles each day for {y} days. Then {N} walks {z} miles each day for {w} days. "
        "{M} walks {a} miles. How many miles do they walk in all?",
        (
            "First {N} walks [p = x * y] miles.",
            "Then {N} walks [q = z * w] miles.",
            "{N} walks [r = p + q] miles.",
            "With the {a} miles of {M} they walk [s = r + a] miles.",
        ),
    ),
    Template(
        "days",
        "{N} has {a} miles to walk. {N} walks {x} miles each day for {y} days. How many miles are left?",
        ("In {y} days {N} walks [p = x * y] miles.", "So [q = a - p] miles are left."),
    ),
    Template(
        "days",
        "{N} has {a} miles to walk. {N} walks {b} miles and then the rest in {x} days. "
        "How many miles does {N} walk each day of the {x} days?",
        ("Then [p = a - b] miles are left.", "Each day {N} walks [q = p / x] miles."),
    ),
    Template(
        "days",
        "{N} makes {x} {I} each hour for {y} hours. {M} makes {z} {I} each hour for {w} hours. "
        "How many more {I} does {N} have than {M}?",
        ("{N} makes [p = x * y] {I}.", "{M} makes [q = z * w] {I}.", "{N} makes [r = p - q] more {I} than {M}."),
    ),
    Template(
        "days",
        "{N} eats {x} {I} each day. There are {a} {I} and {N} buys {b} more. How many days do the {I} last?",
        ("There are [p = a + b] {I}.", "With {x} {I} each day they last [q = p / x] days."),
    ),
    Template(
        "days",
        "{N} makes {x} {I} each day and {M} makes {y} {I} each day. How many {I} do they have after {z} days?",
        ("Each day there are [p = x + y] more {I}.", "In {z} days they have [q = p * z] {I}."),
    ),
    Template(
        "days",
        "{N} has {a} {I}. Each day {N} loses {x} {I} and finds {y}. How many {I} does {N} have after {z} days?",
        (
            "In {z} days {N} loses [p = x * z] {I}.",
            "In {z} days {N} finds [q = y * z] {I}.",
            "With the first {a} {I} {N} has [r = a + q] {I}.",
            "{N} loses {p}, so [s = r - p] {I} are left.",
        ),
    ),
    # --- more and fewer
    Template(
        "compare",
        "{N} has {a} {I}. {M} has {x} times as many. How many {I} do they have in all?",
        ("{M} has [p = a * x] {I}.", "In all they have [q = a + p] {I}."),
    ),
    Template(
        "compare",
        "{N} has {a} {I}. {M} has {b} more {I} than {N}. How many {I} do they have in all?",
        ("{M} has [p = a + b] {I}.", "In all they have [q = a + p] {I}."),
    ),
    Template(
        "compare",
        "{N} has {a} {I}. {M} has {x} fewer {I} than {N} and gives {y} {I} to {N}. "
        "How many {I} does {N} have more than {M}?",
        (
            "First {M} has [p = a - x] {I}.",
            "Then {M} has [q = p - y] {I}.",
            "Now {N} has [r = a + y] {I}.",
            "{N} has [s = r - q] more {I} than {M}.",
        ),
    ),
    Template(
        "compare",
        "{N} has {x} {I}. {M} has {y} times as many {I} and {z} {J}. How many {I} and {J} does {M} have?",
        ("{M} has [p = x * y] {I}.", "With {z} {J} {M} has [q = p + z] {I} and {J}."),
    ),
    Template(
        "compare",
        "{N} has {x} {C} of {y} {I}. {M} has {a} more {I} than {N}. How many {I} do they have in all?",
        ("{N} has [p = x * y] {I}.", "{M} has [q = p + a] {I}.", "In all they have [r = p + q] {I}."),
    ),
    Template(
        "compare",
        "{N} has {a} {I} and {M} has {b} {I}. {N} buys {x} {C} of {y} {I}. How many more {I} does {N} have than {M}?",
        ("The {C} hold [p = x * y] {I}.", "Now {N} has [q = a + p] {I}.", "{N} has [r = q - b] more {I} than {M}."),
    ),
    Template(
        "compare",
        "{N} finds {x} {I}. {M} finds {y} times as many. {N} shares all {I} with {z} friends. "
        "How many {I} does each friend get?",
        ("{M} finds [p = x * y] {I}.", "In all they have [q = x + p] {I}.", "Each friend gets [r = q / z] {I}."),
    ),
    # --- sharing and giving
    Template(
        "sharing",
        "{N} has {a} {I} and gives half to {M}. Then {N} finds {b} {I}. How many {I} does {N} have now?",
        ("{N} gives half to {M}, so [p = a / 2] {I} are left.", "{N} finds {b} more, so now {N} has [q = p + b] {I}."),
    ),
    Template(
        "sharing",
        "{N} has {x} friends with {y} {I} each. {N} has {a} {I} and loses {z}. How many {I} do they have in all?",
        (
            "The friends have [p = x * y] {I}.",
            "{N} loses {z}, so [q = a - z] {I} are left.",
            "In all they have [r = p + q] {I}.",
        ),
    ),
    Template(
        "sharing",
        "{N} makes {x} {C} of {y} {I}. {N} eats {z} {I}, gives {w} {I} to {M} and sells the rest. "
        "How many {I} are in the rest?",
        (
            "{N} makes [p = x * y] {I}.",
            "{N} eats {z}, so [q = p - z] {I} are left.",
            "{N} gives {w} to {M}, so in the rest are [r = q - w] {I}.",
        ),
    ),
    Template(
        "sharing",
        "{N} gives {x} {I} to each of {y} friends and has {a} {I} left. {M} gives {N} {b} more. "
        "How many {I} does {N} have more than the friends?",
        (
            "The friends get [p = x * y] {I}.",
            "{N} has [q = a + b] {I}.",
            "{N} has [r = q - p] more {I} than the friends.",
        ),
    ),
    Template(
        "sharing",
        "{N} has {a} {I}, {M} has {b} {I}. {N} buys {c} more and shares all {I} with {x} friends. "
        "How many {I} does each friend get?",
        ("First they have [p = a + b] {I}.", "Now they have [q = p + c] {I}.", "Each friend gets [r = q / x] {I}."),
    ),
    Template(
        "sharing",
        "{N} puts {a} {I} in {x} {C}. {M} puts {y} more {I} in each of the {C}. How many {I} are in each of the {C}?",
        ("First in each of the {C} are [p = a / x] {I}.", "Then in each of the {C} are [q = p + y] {I}."),
    ),
    # --- rows and gardens
    Template(
        "rows",
        "There are {x} rows of {y} {I} and {z} rows of {w} {J}. {N} eats {a}. How many {I} and {J} are left?",
        (
            "There are [p = x * y] {I}.",
            "There are [q = z * w] {J}.",
            "In all there are [r = p + q] {I} and {J}.",
            "{N} eats {a}, so [s = r - a] are left.",
        ),
    ),
    Template(
        "rows",
        "There are {a} {I} in {x} rows. {N} buys {y} rows more. How many {I} are there now?",
        (
            "In each of the rows are [p = a / x] {I}.",
            "There are now [q = x + y] rows.",
            "In all there are [r = p * q] {I}.",
        ),
    ),
    Template(
        "rows",
        "{N} makes {x} rows of {y} {I}. {M} eats {z} {I} in each of the rows. How many {I} are left?",
        ("In each of the rows are [p = y - z] {I}.", "In all [q = x * p] {I} are left."),
    ),
    Template(
        "rows",
        "There are {a} {I}. {N} puts {x} {I} in each of {y} rows and sells the rest at {z} dollars each to {M}. "
        "How many dollars does {M} pay?",
        ("The rows hold [p = x * y] {I}.", "So [q = a - p] {I} are left.", "{M} pays [r = q * z] dollars."),
    ),
)

HELD_OUT = (
    Template(
        "boxes",
        "{N} has {x} {C} of {y} {I} and {a} {I} more. {N} loses {b} {I}. How many {I} does {N} have now?",
        (
            "The {C} hold [p = x * y] {I}.",
            "With {a} more {N} has [q = p + a] {I}.",
            "{N} loses {b}, so [r = q - b] {I} are left.",
        ),
    ),
    Template(
        "money",
        "{N} has {a} dollars and sells {x} {I} at {y} dollars each. Then {N} pays {b} dollars for {J}. "
        "How many dollars are left?",
        (
            "{N} gets [p = x * y] dollars for the {I}.",
            "With the first {a} dollars {N} has [q = a + p] dollars.",
            "{N} pays {b}, so [r = q - b] dollars are left.",
        ),
    ),
    Template(
        "money",
        "{N} works {x} hours at {y} dollars each hour and {M} works {z} hours at {w} dollars each hour. "
        "How many dollars do they get in all?",
        ("{N} gets [p = x * y] dollars.", "{M} gets [q = z * w] dollars.", "In all they get [r = p + q] dollars."),
    ),
    Template(
        "days",
        "{N} makes {x} {I} each day for {y} days, gives {z} {I} to {M} and puts the rest in {w} {C}. "
        "How many {I} are in each of the {C}?",
        (
            "In {y} days {N} makes [p = x * y] {I}.",
            "{N} gives {z} to {M}, so [q = p - z] {I} are left.",
            "In each of the {w} {C} are [r = q / w] {I}.",
        ),
    ),
    Template(
        "days",
        "{N} walks {x} miles each day and {M} walks {y} miles each day. How many miles do they walk in {z} days?",
        ("Each day they walk [p = x + y] miles.", "In {z} days they walk [q = p * z] miles."),
    ),
    Template(
        "compare",
        "{N} has {a} {I}. {M} has {x} fewer {I} than {N} and finds {b} more. How many {I} do they have in all?",
        ("First {M} has [p = a - x] {I}.", "Now {M} has [q = p + b] {I}.", "In all they have [r = a + q] {I}."),
    ),
    Template(
        "sharing",
        "{N} has {a} {I} and gives half to {M}. {M} has {b} {I} and finds {x} more. How many {I} does {M} have now?",
        (
            "{N} gives [p = a / 2] {I} to {M}.",
            "With the first {b} {I} {M} has [q = p + b] {I}.",
            "{M} finds {x} more, so now {M} has [r = q + x] {I}.",
        ),
    ),
    Template(
        "rows",
        "There are {x} rows of {y} {I}. {N} buys {z} rows of {w} {I} and gives {a} {I} to {M}. "
        "How many {I} does {N} have left?",
        (
            "First there are [p = x * y] {I}.",
            "{N} buys [q = z * w] {I}.",
            "In all there are [r = p + q] {I}.",
            "{N} gives {a} to {M}, so [s = r - a] {I} are left.",
        ),
    ),
)
