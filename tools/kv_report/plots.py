"""Charts as SVG: points and lines with a label each, on logarithmic axes."""

import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 920, 560
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 52, 58
LABEL_HEIGHT, CHARACTER = 14, 6.6  # of the labels' font, in pixels
COLUMN = 60  # labels of points nearer than this, in pixels, are in one column
INK, FAINT = "#222222", "#d9d9d9"
# Okabe and Ito's colours, which are told apart without red and green.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")


class Chart:
    """One chart, in its own units; both axes logarithmic unless linear_y."""

    def __init__(self, title, x_title, y_title, x_range, y_range, linear_y=False, right=RIGHT):
        self.x_range, self.y_range, self.linear_y, self.right = x_range, y_range, linear_y, right
        self.parts = []
        self._text(WIDTH / 2, 26, title, "middle", size=16, weight="bold")
        self._text((LEFT + WIDTH - right) / 2, HEIGHT - 14, x_title, "middle")
        x, y = 18, (TOP + HEIGHT - BOTTOM) / 2
        self.parts.append(f'<text x="{x}" y="{y:.0f}" text-anchor="middle" font-size="13" fill="{INK}" '
                          f'transform="rotate(-90 {x} {y:.0f})">{escape(y_title)}</text>')

    def x(self, value):
        low, high = map(math.log, self.x_range)
        return LEFT + (math.log(value) - low) / (high - low) * (WIDTH - self.right - LEFT)

    def y(self, value):
        f = (lambda v: v) if self.linear_y else math.log
        low, high = map(f, self.y_range)
        return HEIGHT - BOTTOM - (f(value) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)

    def grid(self, xs, ys):
        """Lines with a label each, from {value: label}."""
        for value, label in xs.items():
            if not self.x_range[0] <= value <= self.x_range[1]:
                continue
            x = self.x(value)
            self._line(x, TOP, x, HEIGHT - BOTTOM, FAINT)
            self._text(x, HEIGHT - BOTTOM + 18, label, "middle", size=12)
        for value, label in ys.items():
            y = self.y(value)
            self._line(LEFT, y, WIDTH - self.right, y, FAINT)
            self._text(LEFT - 8, y + 4, label, "end", size=12)

    def level(self, value, label):
        """A dashed line across, for what all else is compared with."""
        y = self.y(value)
        self._line(LEFT, y, WIDTH - self.right, y, INK, 'stroke-dasharray="5 4"')
        self._text(LEFT + 6, y - 5, label, "start", size=12)

    def points(self, points):
        """[(x, y, label, colour, square, to the left)], labels in columns beside neighbours."""
        for column in self._columns(points):
            to_left = column[0][5]
            edge = (min if to_left else max)(self.x(p[0]) for p in column)
            tx = edge - 16 if to_left else edge + 16
            heights = self._apart([self.y(p[1]) for p in column])
            for (x, y, label, colour, _, _), at in zip(column, heights):
                self._line(self.x(x), self.y(y), tx, at, colour, 'stroke-width="0.8"')
                self._text(tx + (-3 if to_left else 3), at + 4, label,
                           "end" if to_left else "start", size=12)
        for x, y, _, colour, square, _ in points:
            self._marker(self.x(x), self.y(y), colour, square)

    def _columns(self, points):
        """Points with labels on the same side, and less than a label from one to the next."""
        columns = []
        for p in sorted(points, key=lambda p: (p[5], p[0])):
            near = columns and columns[-1][-1][5] == p[5] and (
                self.x(p[0]) - self.x(columns[-1][-1][0]) < COLUMN)
            columns[-1].append(p) if near else columns.append([p])
        return columns

    def _marker(self, x, y, colour, square):
        if square:
            self.parts.append(
                f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="{colour}"/>')
        else:
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{colour}"/>')

    def lines(self, series):
        """[(label, [(x, y)])], each with its label at the right end."""
        ends = [self.y(points[-1][1]) for _, points in series]
        for i, ((label, points), at) in enumerate(zip(series, self._apart(ends))):
            colour = COLOURS[i % len(COLOURS)]
            dash = "" if i < len(COLOURS) else 'stroke-dasharray="7 3"'
            path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
            self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" '
                              f'stroke-width="2" {dash}/>')
            for x, y in points:
                self.parts.append(
                    f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3" fill="{colour}"/>')
            x, y = points[-1]
            self._line(self.x(x) + 4, self.y(y), self.x(x) + 16, at, colour, 'stroke-width="0.8"')
            self._text(self.x(x) + 19, at + 4, label, "start", size=12, fill=colour)

    def legend(self, entries):
        """[(colour, square, text)] at the top right."""
        for i, (colour, square, text) in enumerate(entries):
            y = TOP + 16 + 18 * i
            x = WIDTH - self.right - 14 - CHARACTER * max(len(e[2]) for e in entries)
            self._marker(x - 12, y - 4, colour, square)
            self._text(x, y, text, "start", size=12)

    def svg(self):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
                f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">\n'
                f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
                + "\n".join(self.parts) + "\n</svg>\n")

    def _apart(self, wanted):
        """Heights near those wanted, none closer than a label's: pushed apart, then back inside."""
        order = sorted(range(len(wanted)), key=lambda i: wanted[i])
        heights, lowest = [0.0] * len(wanted), -math.inf
        for i in order:
            heights[i] = lowest = max(wanted[i], lowest + LABEL_HEIGHT)
        lowest = HEIGHT - BOTTOM + LABEL_HEIGHT - 4
        for i in reversed(order):
            heights[i] = lowest = min(heights[i], lowest - LABEL_HEIGHT)
        return heights

    def _line(self, x0, y0, x1, y1, colour, more=""):
        self.parts.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" '
                          f'stroke="{colour}" {more}/>')

    def _text(self, x, y, text, anchor, size=13, weight="normal", fill=INK):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
                          f'font-weight="{weight}" fill="{fill}">{escape(text)}</text>')
