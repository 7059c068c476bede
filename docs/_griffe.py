# SPDX-License-Identifier: Apache-2.0
"""Lets the reference show our ``Example:`` sections as code; griffe knows only the plural."""

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames the section in every docstring that griffe loads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called once for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
