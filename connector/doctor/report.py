"""What an examination comes to: findings in sections, and the document of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal, Protocol

__all__ = ["LEVELS", "Finding", "Level", "Report", "Section", "one_line"]

Level = Literal["ok", "note", "problem"]
"""ok: as it should be. note: it works, but it costs something or could not be found out. problem: what was asked
for cannot be had, or hardware or installation is at fault."""

LEVELS: Final[tuple[Level, ...]] = ("ok", "note", "problem")
"""From good to bad."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what, in a word; the same in every run.
        text: what was found, one line.
        remedy: what to change, one line; None where there is nothing to change.
    """

    name: str
    level: Level
    text: str
    remedy: str | None = None


class Section(Protocol):
    """One part of the examination."""

    @property
    def name(self) -> str:
        """Its key in the document."""
        ...

    @property
    def findings(self) -> Sequence[Finding]:
        """In the order in which they are told."""
        ...

    def document(self) -> Mapping[str, object]:
        """What was found as JSON values, the findings apart."""
        ...


@dataclass(frozen=True, slots=True)
class Report:
    """All sections of one run."""

    sections: tuple[Section, ...]

    def count(self, level: Level) -> int:
        """Findings of that level."""
        return sum(finding.level == level for section in self.sections for finding in section.findings)

    @property
    def level(self) -> Level:
        """The worst of all findings."""
        return next((level for level in reversed(LEVELS) if self.count(level)), "ok")

    def document(self) -> dict[str, object]:
        """The same as JSON values: level and counts, then each section under its name."""
        document: dict[str, object] = {
            "level": self.level,
            "problems": self.count("problem"),
            "notes": self.count("note"),
        }
        for section in self.sections:
            findings = [asdict(finding) for finding in section.findings]
            document[section.name] = {"findings": findings, **section.document()}
        return document


def one_line(error: BaseException | str) -> str:
    """An error's message without its line breaks; its class where it has none."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return text or type(error).__name__
