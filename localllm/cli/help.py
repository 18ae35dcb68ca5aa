"""How help reads: no types of Python's, commands in the order in which people need them."""

from typing import Any

from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A command whose help tells arguments by their names alone."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, a section each."""
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            parameters = [one for one in self.get_params(ctx) if one.param_type_name == kind]
            rows = [row for one in parameters if (row := one.get_help_record(ctx))]
            if kind == "argument":
                rows = [(name.partition(" <")[0], text) for name, text in rows]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
