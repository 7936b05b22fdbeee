"""Does the text hold JSON that its row's schema accepts?

The JSON is the last block fenced as json, or the last fenced block, or the whole text, or what is between the first and
the last brace. The schema is the row's `schema`, as an object or as text (JSON Schema, by the package `jsonschema`).

1.0: the JSON is valid. 0.0: there is no JSON, or the schema refuses it, or checking exceeds its deadline, in a process
that is killed then. An error: the row's schema is no schema; such rows are refused at start. `verify_parses` asks for
JSON alone.
"""

import json
import re
from contextlib import suppress
from typing import Any

from headway.errors import ConfigError, translated
from headway.tasks.verifiers import Row, verifier
from headway.tasks.verifiers.bounded import Bounded

_FENCED = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_LONGEST = 1 << 20


def check_row(row: Row) -> str:
    from_package = _package()
    try:
        from_package.validators.validator_for(_schema(row)).check_schema(_schema(row))
    except (from_package.SchemaError, ValueError, TypeError, AttributeError) as error:
        return f"the row's schema is no JSON schema: {' '.join(str(error).split())[:200]}"
    return ""


def warm_up() -> None:
    _package()


@verifier(needs=("schema",), check_row=check_row, warm_up=warm_up)
def verify(row: Row, text: str) -> float:
    """1.0 when the text's JSON is what the schema asks for."""
    schema = json.dumps(_schema(row))
    return float(_ACCEPTS.within_limits(schema, text[-_LONGEST:], otherwise=False))


@verifier(needs=())
def verify_parses(row: Row, text: str) -> float:
    """1.0 when the text holds JSON."""
    return float(find_json(text[-_LONGEST:]) is not None)


def find_json(text: str) -> list[Any] | None:
    """The JSON value of a text, in a list of one; None where there is none."""
    fenced = _FENCED.findall(text)
    named = [body for language, body in fenced if language.lower() == "json"]
    candidates = [*named[-1:], *(body for _, body in fenced[-1:]), text]
    candidates.append(text[text.find("{") : text.rfind("}") + 1])
    for candidate in candidates:
        with suppress(ValueError, RecursionError):
            return [json.loads(candidate)]
    return None


def _schema(row: Row) -> Any:
    schema = json.loads(row["schema"]) if isinstance(row["schema"], str) else row["schema"]
    if not isinstance(schema, dict | bool):
        raise ValueError(f"a schema is an object, not {type(schema).__name__}")
    return schema


def _accepts(schema: str, text: str) -> bool:
    found = find_json(text)
    return found is not None and bool(
        _package().validators.validator_for(json.loads(schema))(json.loads(schema)).is_valid(found[0])
    )


def _package() -> Any:
    with translated(
        ImportError, ConfigError, "the JSON schema verifier needs the package jsonschema; install headway-rl[schema]"
    ):
        import jsonschema
    return jsonschema


_ACCEPTS = Bounded(_accepts, deadline_s=2.0, prepare=warm_up)
"""Schemas hold regular expressions, and a text may make one take for ever."""
