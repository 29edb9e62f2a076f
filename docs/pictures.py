"""The pictures of README.md: ``python docs/pictures.py`` draws them anew."""

from pathlib import Path

from drawings import start

FOLDER = Path(__file__).parent / "pictures"


def pictures() -> dict[str, str]:
    """Return the SVG of every picture, by the name of its file."""
    return {"mask.svg": start.draw()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg, encoding="utf-8")
