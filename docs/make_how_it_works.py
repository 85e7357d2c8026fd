"""Draw docs/pictures/how-it-works.svg: `python docs/make_how_it_works.py`; a test compares them."""

from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "how-it-works.svg"
WIDTH, HEIGHT = 860, 330
INK, PALE, WARM, COOL = "#333333", "#f4f1ea", "#d55e00", "#0072b2"
SIDE = 120  # of a view
CELLS = 7  # per side, each a quarter of the view: neighbours overlap


def picture() -> str:
    """Return the figure: three levels, the regions read on each, and the prediction."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>',
    ]
    parts += _view(20, 50, "level 1: the whole image", scene=True)
    parts += _cells(20, 50, {(1, 4): WARM, (4, 1): COOL})
    for y, colour, cell in ((14, WARM, (2, 3)), (166, COOL, (5, 2))):
        parts += _view(290, y + 22, "level 2: a cell" if y < 100 else "", colour=colour)
        parts += _cells(290, y + 22, {cell: colour})
        parts += _view(500, y + 22, "level 3: a cell of the cell" if y < 100 else "", colour=colour)
        parts += _found(500, y + 22, colour)
        parts.append(_arrow(290 + SIDE + 4, y + 82, 496, y + 82))
        parts.append(_arrow(500 + SIDE + 4, y + 82, 676, 160 if y < 100 else 190))
    parts += [
        _arrow(20 + SIDE + 4, 90, 286, 80),
        _arrow(20 + SIDE + 4, 130, 286, 240),
        _text(20, 258, "The location module scores cells;"),
        _text(20, 276, "only the best are read from the file."),
        _text(20, 294, "One encoder for all views, which"),
        _text(20, 312, "all have the same size."),
        f'<rect x="680" y="138" width="164" height="74" rx="6" fill="{PALE}" stroke="{INK}"/>',
        _text(690, 161, "aggregator and head:"),
        _text(690, 180, "class and probability"),
        _text(690, 199, "from all regions"),
        _text(680, 240, "The regions that were"),
        _text(680, 258, "read are the explanation."),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _view(x: int, y: int, title: str, *, scene: bool = False, colour: str = INK) -> list[str]:
    """Return a view with its title; `scene` adds land to the whole image."""
    parts = [_text(x, y - 10, title)] if title else []
    parts.append(
        f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="{PALE}" '
        f'stroke="{colour}" stroke-width="2"/>'
    )
    if scene:
        curve = f"M{x} {y + 90}c30 -26 50 20 70 -6s30 -30 50 -14V{y + SIDE}H{x}z"
        parts.append(f'<path d="{curve}" fill="#d7e3d0"/>')
    return parts


def _cells(x: int, y: int, chosen: dict[tuple[int, int], str]) -> list[str]:
    """Return cell centres as dots and the outlines of the chosen cells."""
    step = (SIDE - SIDE / 4) / (CELLS - 1)
    parts = [
        f'<circle cx="{x + SIDE / 8 + column * step:g}" cy="{y + SIDE / 8 + row * step:g}" '
        'r="1.6" fill="#999999"/>'
        for row in range(CELLS)
        for column in range(CELLS)
    ]
    for (row, column), colour in chosen.items():
        parts.append(
            f'<rect x="{x + column * step:g}" y="{y + row * step:g}" width="{SIDE / 4:g}" '
            f'height="{SIDE / 4:g}" fill="{colour}" fill-opacity="0.25" stroke="{colour}" '
            'stroke-width="2"/>'
        )
    return parts


def _found(x: int, y: int, colour: str) -> list[str]:
    """Return details that are visible on this level only: a few buildings."""
    places = ((20, 24), (62, 18), (30, 64), (74, 56), (54, 90))
    return [
        f'<rect x="{x + across}" y="{y + down}" width="26" height="16" fill="{colour}" '
        'fill-opacity="0.45"/>'
        for across, down in places
    ]


def _arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    return f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{INK}" fill="none" marker-end="url(#tip)"/>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
