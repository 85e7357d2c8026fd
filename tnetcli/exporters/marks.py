"""How windows are marked in pictures: colour and weight tell attention, dashes tell the level."""

from dataclasses import dataclass

from tnetcli.exporters.colours import Colour, attention_colour
from tnetcli.exporters.drawing import (
    BRIGHT,
    DARK,
    QUIET,
    Block,
    Rect,
    Sheet,
    legible_on,
    line_height,
)
from tnetcli.exporters.lettering import Sizes
from tnetcli.exporters.shown import is_chosen, known_attention
from tnetcli.prediction import SeenWindow

UNCHOSEN = BRIGHT  # the whole image
DASHES: tuple[tuple[int, ...], ...] = ((), (4, 2), (1, 1), (5, 1, 1, 1))  # of levels 2, 3, ...
THINNEST, THICKEST = 2.0, 7.0  # pixels in a picture of 1600
HALO = 1.5
AIR = 1.4  # times the size of its number that a window must have
DARKEST = 0.35  # of all colours: darker lines would not be told from their halo
TYPICAL = 0.75  # of the most attention, for lines that show what dashes mean


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one picture; `most` is the attention that has the strongest."""

    sizes: Sizes
    most: float

    def colour(self, window: SeenWindow) -> Colour:
        """Return the colour of a window; an attention that nobody knows looks like none."""
        if not is_chosen(window):
            return UNCHOSEN
        return line_colour(self._share(window))

    def width(self, window: SeenWindow) -> int:
        """Return the pixels that its line is wide."""
        return self._width(self._share(window) if is_chosen(window) else 0.0)

    def _width(self, share: float) -> int:
        return self.sizes.stroke(THINNEST + share * (THICKEST - THINNEST))

    @property
    def halo(self) -> int:
        """Return the pixels that a halo is wide."""
        return self.sizes.stroke(HALO)

    def _share(self, window: SeenWindow) -> float:
        attention = known_attention(window)
        return 0.0 if attention is None or self.most <= 0 else min(attention / self.most, 1.0)

    def draw(self, sheet: Sheet, window: SeenWindow, rect: Rect, within: Rect) -> None:
        """Draw the line of a window."""
        sheet.line(
            rect,
            self.colour(window),
            self.width(window),
            dashes_of(window.level),
            within=within,
            halo=self.halo,
        )

    def tag(
        self, sheet: Sheet, window: SeenWindow, rect: Rect, within: Rect, taken: list[Rect]
    ) -> None:
        """Write the number of a window into a corner of it that is not taken, if there is one."""
        font, text = self.sizes.tag, number_of(window)
        pad = self.sizes.px(4)
        across, down = round(font.getlength(text)) + 2 * pad, line_height(font) + pad // 2
        inside = rect.wider(-(self.width(window) + 1) // 2 - self.halo).cut(within)
        room = inside.right - inside.left, inside.bottom - inside.top
        if room[0] < AIR * across or room[1] < AIR * down:
            return
        corners = [
            Rect(left, top, left + across, top + down)
            for top in (inside.top, inside.bottom - down)
            for left in (inside.left, inside.right - across)
        ]
        # Each level begins with another: the first cell of a window begins where it does.
        first = (window.level - 2) % len(corners)
        for corner in corners[first:] + corners[:first]:
            if not any(corner.meets(other) for other in taken):
                taken.append(corner)
                colour = self.colour(window)
                sheet.fill(corner, colour)
                at = corner.left + pad, corner.top + pad // 4
                sheet.text(*at, text, font, legible_on(colour))
                return

    def sample(self, level: int, is_whole: bool, length: int) -> Block:
        """Return a line as the windows of a level have it."""
        colour = UNCHOSEN if is_whole else line_colour(TYPICAL)
        width = self._width(0.0 if is_whole else TYPICAL)
        height = line_height(self.sizes.text)

        def draw(sheet: Sheet, x: int, y: int) -> None:
            within = Rect(x, y, x + length, y + height)
            # Of the frame only its upper side lies within.
            rect = Rect(x - 2 * width, y + height // 2, x + length + 2 * width, y + 2 * height)
            sheet.line(rect, colour, width, dashes_of(level), within=within, halo=self.halo)

        return Block(height, draw)

    def wedge(self, width: int) -> Block:
        """Return the scale of attention: colours and weights from none to the most."""
        font = self.sizes.caption
        high = self.sizes.px(3 * THICKEST)

        def draw(sheet: Sheet, x: int, y: int) -> None:
            for step in range(width):
                share = step / max(width - 1, 1)
                tall = max(round(high * (THINNEST + share * (THICKEST - THINNEST)) / THICKEST), 1)
                top = y + (high - tall) // 2
                column = Rect(x + step, top, x + step + 1, top + tall)
                sheet.fill(column.taller(self.halo), DARK)
                sheet.fill(column, line_colour(share))
            for share in (0.0, 0.5, 1.0):
                text = f"{share * self.most:.2g}"
                room = round(font.getlength(text))
                sheet.text(
                    x + round(share * (width - room)), y + high + 2 + self.halo, text, font, QUIET
                )

        return Block(high + 2 + self.halo + line_height(font), draw)


def line_colour(share: float) -> Colour:
    """Return the colour of a line by its share of the most attention; also in grey, more is more.

    All are brighter than the halo: one of the two stands out from any ground.
    """
    return attention_colour(DARKEST + share * (1 - DARKEST))


def dashes_of(level: int) -> tuple[int, ...]:
    """Return the dashes of a level, () for a whole line."""
    return DASHES[max(level - 2, 0) % len(DASHES)]


def number_of(window: SeenWindow) -> str:
    """Return level and rank, by which a window is found in a picture and in its sheet."""
    return f"{window.level}.{'g' if window.is_glimpse else ''}{window.rank}"
