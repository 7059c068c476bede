# SPDX-License-Identifier: Apache-2.0
"""Words that statements share: units of privacy (what is added or removed between neighboring data sets), and times."""

import re
from datetime import UTC, datetime

ONE_EXAMPLE = "example"  # the usual unit
ITEM = "one item of the dataset"  # the same, in statements
# what is used of an owner: of a training, of a training on the user's table, and of synthetic rows
OF_TRAINING, OF_TABLE, OF_SYNTHESIS = USES = ("of its examples in a step", "rows in a step", "of its rows")


def with_at_most(unit: str, most: int) -> str:
    """Returns a unit of privacy that has at most this number of examples.

    >>> with_at_most("customer", 5)
    'customer with at most 5 examples'
    """
    return f"{unit} with at most {most} example{'s' if most > 1 else ''}"


def owner_in_words(owner: str, most: int, use: str) -> str:
    """Returns what is protected where examples have owners, as a statement says it.

    >>> owner_in_words("customer", 5, OF_TABLE)
    'one customer, at most 5 rows in a step'
    """
    return f"one {owner}, at most {most} {use}"


def plural(word: str) -> str:
    """Returns the plural of an English word, by the usual rules.

    >>> [plural(word) for word in ("customer", "company", "day", "class")]
    ['customers', 'companies', 'days', 'classes']
    """
    if re.search("[^aeiou]y$", word):
        return f"{word[:-1]}ies"
    return f"{word}es" if re.search("(s|x|z|ch|sh)$", word) else f"{word}s"


def unit_of_column(column: str) -> str:
    """Returns the unit that a column's name stands for.

    >>> [unit_of_column(name) for name in ("customer", "customer_id", "userId", "paid")]
    ['customer', 'customer', 'user', 'paid']
    """
    return re.sub(r"([_ -][iI][dD]|(?<=[a-z0-9])(Id|ID))$", "", column).replace("_", " ").strip() or column


def now() -> str:
    """Returns the time in UTC, by ISO 8601."""
    return iso(datetime.now(UTC))


def iso(moment: datetime) -> str:
    """Returns a time by ISO 8601."""
    return moment.isoformat(timespec="seconds")


def dated(name: str) -> str:
    """Returns a name for a new folder: this one and the local time."""
    return f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
