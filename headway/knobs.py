"""The surface of a config: every knob by its name, overrides of one, and a sentence for what is wrong with one.

All of it is read from the sections' own fields; `root` is the section that holds the others.
"""

import difflib
import json
import tomllib
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from headway.errors import ConfigError


def apply_override(root: type[BaseModel], values: dict[str, Any], override: str) -> None:
    key, separator, text = override.removeprefix("--").partition("=")
    if not separator or "." not in key:
        raise ConfigError(f"override {override!r} is not of the form --section.key=value")
    *sections, name = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    parsed = _parse_value(text)
    # A directory named 2024 is no number.
    values[name] = text if _takes_text(root, key) and not isinstance(parsed, str) else parsed


def _parse_value(text: str) -> Any:
    """A TOML value where it is one (numbers, booleans, lists, quoted strings), else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def sentence(root: type[BaseModel], error: ValidationError) -> str:
    """The first problem as one sentence."""
    problem = error.errors()[0]
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_hint(root, location)}"
    if problem["type"] == "missing":
        return f"{key} is required ({_describe(root, location)})"
    got = json.dumps(problem["input"], default=str)
    if problem["type"] == "model_type":
        return f"{key} = {got} is not possible: it is a section, written [{key}]"
    return f"{key} = {got} is not possible: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _hint(root: type[BaseModel], location: list[str]) -> str:
    """Where an unknown key may belong: under the same name in another section, else the nearest name in this one."""
    *section, name = location
    same = [known for known in keys(root) if known.split(".")[-1] == name]
    nearest = difflib.get_close_matches(name, _keys_at(root, section), n=1, cutoff=0.4)
    found = [*same, *(".".join([*section, match]) for match in nearest)]
    return f"; did you mean {found[0]}?" if found else ""


def _takes_text(root: type[BaseModel], key: str) -> bool:
    *section, name = key.split(".")
    return key in keys(root) and _section_at(root, section).model_fields[name].annotation is str


def _section_at(root: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """The section a location lies in; names and numbers of a dict's or list's sections are passed over."""
    section = root
    parts = iter(location)
    for part in parts:
        annotation = section.model_fields[part].annotation
        if args := get_args(annotation):
            annotation = args[-1]
            next(parts, None)
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
        section = annotation
    return section


def _keys_at(root: type[BaseModel], location: list[str]) -> list[str]:
    return list(_section_at(root, location).model_fields)


def _describe(root: type[BaseModel], location: list[str]) -> str:
    field = _section_at(root, location[:-1]).model_fields[location[-1]]
    return field.description or f"section [{location[-1]}]"


def keys(root: type[BaseModel]) -> dict[str, str]:
    """Every knob as section.key, with its sentence."""
    found: dict[str, str] = {}

    def visit(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                visit(annotation, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = field.description or ""

    visit(root, "")
    return found
