"""A doctor's report as lines to read, and to paste into a bug report."""

from collections.abc import Iterable, Sequence
from typing import Any

from tnetcli.wording import counted, in_bytes, printable
from tnetcli.workflows.doctor import Finding, Report
from tnetcli.workflows.libraries import BROKEN, OK, Found

LONGEST = 300  # characters of a line's text


def as_text(report: Report) -> str:
    """Return the report, section by section; problems stand at the end, where they are seen."""
    facts = report.facts
    extras = {
        name: "installed" if each["state"] == OK else f"{_state(each['state'])}: {each['install']}"
        for name, each in facts["extras"].items()
    }
    return "\n".join(
        [
            *_section(f"tnet {facts['tnet']['version']}", _machine(facts)),
            *_section(
                "libraries", {each.library.name: _library(each) for each in report.libraries}
            ),
            *_section("extras", extras),
            *_section("environment", facts["environment"] or {"none": "that matters is set"}),
            *_findings("notes", report.notes),
            *(_findings("problems", report.problems) or ["problems", "  none known"]),
        ]
    )


def _machine(facts: dict[str, Any]) -> dict[str, str]:
    package, python, system = facts["tnet"], facts["python"], facts["system"]
    cores = facts["cores"]
    return {
        "package": package["package"],
        "bundled": f"models: {', '.join(package['models']) or 'none'}; "
        + counted(package["recipes"], "recipe"),
        "python": f"{python['version']} ({python['implementation']}), {python['executable']}",
        "system": ", ".join(filter(None, (system["platform"], system["libc"]))),
        "file names": system["file_names"],
        "cores": f"{cores['available']} of {cores['machine']}",
        "memory": _memory(facts["memory"]),
        "cache": _cache(facts["cache"]),
    }


def _memory(told: dict[str, int | None]) -> str:
    words = (("total", "{}"), ("available", "{} free"), ("limit", "at most {} for a job"))
    parts = [text.format(in_bytes(told[key] or 0)) for key, text in words if told[key]]
    return ", ".join(parts) or "not told"


def _cache(told: dict[str, Any]) -> str:
    if told["folder"] is None:
        return str(told["problem"])
    copies = counted(told["files"], "small copy", "small copies")
    size = f"{copies}, {in_bytes(told['bytes'])}"
    return f"{told['folder']}: {size}{'' if told['writable'] else ', cannot be written to'}"


def _library(found: Found) -> str:
    if found.state != OK:
        reason = f": {found.reason}" if found.reason else ""
        return f"{found.version or ''} {_state(found.state)}{reason}".strip()
    details = [
        f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in found.details.items()
        if name != "warning"
    ]
    return f"{found.version or 'ok':<12} {', '.join(details)}".strip()


def _state(state: str) -> str:
    return "BROKEN" if state == BROKEN else "not installed"


def _section(title: str, lines: dict[str, str]) -> list[str]:
    width = max(map(len, lines))
    return [
        title,
        *(f"  {name:<{width}}  {printable(text, LONGEST)}" for name, text in lines.items()),
    ]


def _findings(title: str, found: Sequence[Finding]) -> list[str]:
    return [title, *_lines(found)] if found else []


def _lines(found: Iterable[Finding]) -> Iterable[str]:
    for each in found:
        yield f"  {printable(each.problem, LONGEST)}"
        yield f"    hint: {printable(each.hint, LONGEST)}"
