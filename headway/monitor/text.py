"""Text and numbers as people read them; text that is not ours is escaped for terminals and pipes."""

from itertools import pairwise

_SPARKS = "▁▂▃▄▅▆▇█"


def clean(text: object, limit: int = 300) -> str:
    """One printable line: no control or escape characters, no newlines, no markup, at most `limit` characters."""
    whole = " ".join(str(text)[: 4 * limit].split())
    line = "".join(char if char.isprintable() else "?" for char in whole)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def printable(text: object) -> str:
    """All of a text, lines included; control and escape characters are shown as escapes."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in str(text))


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def ago(seconds: float) -> str:
    """How long ago, in one unit."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def number(value: float | None, spec: str) -> str:
    """A number of the log, where one that was not finite is null."""
    return "-".rjust(int(spec.split(".")[0] or 1)) if value is None else format(value, spec)


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def sparkline(values: list[float], width: int) -> str:
    """The whole series in `width` characters: the mean of each stretch, scaled between the least and the largest."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((mean - low) * scale)] for mean in means)
