"""Proves: names of points in a drawing overlap neither each other nor a line, wherever they are."""

from __future__ import annotations

import re
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from memopt._plan.drawing import CurveMark, _drawn
from memopt.show.labels import Box, Named, label_boxes


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_names_find_room_wherever_the_points_are(data: st.DataObject) -> None:
    """Also where all points are one."""
    names = (
        "this plan",
        "keep all",
        "recipes only",
        "each block checkpointed",
        "9 segments (sqrt)",
    )
    near = data.draw(st.sampled_from([1.0, 40.0, 1000.0]))
    places = st.floats(0, 1)
    marks = [
        CurveMark(name, "", 400 + near * data.draw(places) / 2, 150 + data.draw(places), "")
        for name in names
    ]
    drawn = "".join(_drawn(marks, Box(56, 30, 990, 340)))
    found = re.findall(r'class="name halo" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)<', drawn)
    assert sorted(name for *_, name in found) == sorted(names)
    boxes = [(float(x), float(y), len(name) * 6.6) for x, y, name in found]
    for (x, y, width), (other_x, other_y, other_width) in combinations(boxes, 2):
        is_beside = x + width <= other_x + 0.2 or other_x + other_width <= x + 0.2
        assert is_beside or abs(y - other_y) >= 13.8


@given(st.lists(st.tuples(st.floats(60, 900), st.floats(40, 300)), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_names_leave_out_upright_lines(places: list[tuple[float, float]]) -> None:
    frame, across = Box(56, 30, 990, 340), 400.0
    line = [(across, frame.top), (across, frame.bottom)]
    boxes = label_boxes([Named(x, y, 120) for x, y in places], frame, 14, 3, [line])
    assert all(box.right <= across or across <= box.left for box in boxes)
