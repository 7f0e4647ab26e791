"""The cache of a group against a dictionary of rows, over random sequences of operations.

Every token gets keys and values that no other token of any row has, so that a column of another
row, or of one that left, is seen. Rows that leave may have held NaN.
"""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.inference.decoding.cache import GroupCache

CPU = torch.device("cpu")
LAYERS, FIXED, ABSENT = 4, (1,), 3  # the last layer belongs to another stage
HEADS, SIZE = 2, 3
POISON = math.nan


class Rows:
    """The expected content of the cache: numbers of each row's tokens and of its images, by row."""

    def __init__(self):
        self.rows = []  # (numbers of tokens, numbers of image columns), in the cache's order

    def remove(self, index):
        self.rows[index] = self.rows[-1]
        self.rows.pop()


def states(numbers, layer, part):
    """[K, T, D] of tokens with these numbers; another layer or part gets others."""
    base = torch.tensor(numbers, dtype=torch.float32)[None, :, None] * 100
    heads = torch.arange(HEADS)[:, None, None] * 10.0
    return base + heads + torch.arange(SIZE) + 0.25 * layer + 0.125 * part


def write(cache, numbers_BT, images):
    """Write as the layers of a model do: padding gets numbers of its own."""
    for layer in range(LAYERS):
        if layer == ABSENT:
            continue
        if layer in FIXED:
            if images is not None:
                cache.update(*(torch.stack([states(row, layer, part) for row in images])
                               for part in (0, 1)), layer)  # fmt: skip
            continue
        parts = (torch.stack([states(row, layer, part) for row in numbers_BT]) for part in (0, 1))
        cache.update(*parts, layer)


class Machine:
    """Caches of several groups, their models, and numbers that never repeat."""

    def __init__(self):
        self.groups = []
        self._next = 0

    def new(self, count):
        self._next += count
        return list(range(self._next - count, self._next))

    def prefill(self, lengths, num_columns):
        width = max(lengths)
        cache, model = GroupCache(LAYERS, len(lengths), fixed_layers=FIXED), Rows()
        cache.begin(width, lengths=lengths)
        tokens = [self.new(length) for length in lengths]
        images = [self.new(num_columns) for _ in lengths] if num_columns else None
        padded = [[-7] * (width - len(row)) + row for row in tokens]
        write(cache, padded, images)
        cache.advance(width)
        model.rows = list(zip(tokens, images or [[] for _ in lengths], strict=True))
        return cache, model

    def step(self, place):
        cache, model = self.groups[place]
        cache.begin(1)
        fresh = [self.new(1) for _ in model.rows]
        write(cache, fresh, None)
        cache.advance(1)
        for (tokens, _), new in zip(model.rows, fresh, strict=True):
            tokens += new

    def remove(self, place, index):
        cache, model = self.groups[place]
        window = cache.window
        for layer in (0, 2):  # the row's numbers went wrong before it left
            first = window.first_columns[index]
            cache.layers[layer].keys[index, :, first : window.end] = POISON
        if cache.layers[FIXED[0]].keys is not None and model.rows[index][1]:
            cache.layers[FIXED[0]].values[index] = POISON
        cache.remove(index)
        model.remove(index)
        if not model.rows:
            self.groups.pop(place)

    def join(self, source, target):
        cache, model = self.groups[target]
        other, rows = self.groups[source]
        cache.join(other)
        model.rows += rows.rows
        self.groups.pop(source)

    def check(self):
        for cache, model in self.groups:
            check_window(cache, model)
            check_fixed(cache, model)
            assert cache.layers[ABSENT].keys.numel() == 0


def check_window(cache, model):
    window = cache.window
    width = max(len(tokens) for tokens, _ in model.rows)
    assert window.num_rows == len(model.rows)
    assert window.width == width == cache.get_seq_length(), "columns that no row uses"
    mask = window.mask(0, CPU)
    expected = [[0] * (width - len(tokens)) + [1] * len(tokens) for tokens, _ in model.rows]
    assert mask.tolist() == expected
    assert window.is_ragged == any(0 in row for row in expected)
    assert window.mask(1, CPU).tolist() == [[*row, 1] for row in expected]
    for layer in (0, 2):
        used = (slice(window.num_rows), slice(None), slice(window.start, window.end))
        for part, name in enumerate(("keys", "values")):
            buffer = getattr(cache.layers[layer], name)
            assert buffer.shape[0] == window.row_capacity >= window.num_rows
            assert buffer.shape[2] == window.column_capacity >= window.end
            assert buffer[used].isfinite().all(), "0 * nan is not 0: masks hide no nan"
            for row, (tokens, _) in enumerate(model.rows):
                found = buffer[row, :, window.end - len(tokens) : window.end]
                assert torch.equal(found, states(tokens, layer, part))


def check_fixed(cache, model):
    layer = cache.layers[FIXED[0]]
    width = max(len(images) for _, images in model.rows)
    assert cache.fixed.lengths == [len(images) for _, images in model.rows]
    assert layer.get_seq_length() == width and layer.is_initialized == (width > 0)
    if not width:
        assert layer.keys is None and layer.values is None
        return
    for part, found in enumerate((layer.keys, layer.values)):
        assert found.shape == (len(model.rows), HEADS, width, SIZE)
        for row, (_, images) in enumerate(model.rows):
            assert torch.equal(found[row, :, : len(images)], states(images, FIXED[0], part))
            assert not found[row, :, len(images) :].any(), "rows of text must add nothing"


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_group_holds_what_its_rows_brought(data):
    machine = Machine()
    actions = st.sampled_from(["prefill", "step", "step", "steps", "remove", "remove", "join"])
    for _ in range(data.draw(st.integers(4, 20))):
        action = data.draw(actions)
        count = len(machine.groups)
        if action == "prefill" or not count:
            lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
            machine.groups.append(
                machine.prefill(lengths, data.draw(st.sampled_from([0, 0, 3, 7])))
            )
        elif action == "step":
            machine.step(data.draw(st.integers(0, count - 1)))
        elif action == "steps":  # past the end of the buffers
            place = data.draw(st.integers(0, count - 1))
            for _ in range(data.draw(st.integers(1, 40))):
                machine.step(place)
        elif action == "remove":
            place = data.draw(st.integers(0, count - 1))
            machine.remove(place, data.draw(st.integers(0, len(machine.groups[place][1].rows) - 1)))
        elif count > 1:
            source, target = data.draw(st.permutations(range(count)))[:2]
            machine.join(source, target)
        machine.check()


def test_no_number_of_a_row_that_left_is_seen_where_others_take_its_place():
    """Rows in one place, one after the other: a long one, a shorter one, then a long neighbour."""
    machine = Machine()
    machine.groups = [machine.prefill([5, 50, 50], 7)]
    machine.remove(0, 2)
    for length, num_columns in ((20, 0), (30, 3)):
        machine.groups.append(machine.prefill([length], num_columns))
        machine.join(1, 0)
        machine.check()
        machine.remove(0, 2)
    machine.remove(0, 1)  # now the columns of the long rows are free
    for length, num_columns in ((5, 0), (40, 3)):
        machine.groups.append(machine.prefill([length], num_columns))
        machine.join(1, 0)
        machine.check()
    assert len(machine.groups[0][1].rows) == 3 == machine.groups[0][0].window.row_capacity


def test_room_for_passes_that_follow_is_made_once():
    """A prompt that is read in pieces: nothing moves between them, and they end side by side."""
    cache, tokens, moved = GroupCache(LAYERS, 1, fixed_layers=FIXED), list(range(250)), []
    for first in range(0, 250, 50):
        cache.begin(50, lengths=[50] if first == 0 else None, room=250)
        write(cache, [tokens[first : first + 50]], None)
        cache.advance(50)
        moved.append(cache.layers[0].keys)
    assert all(keys is moved[0] for keys in moved)
    model = Rows()
    model.rows = [(tokens, [])]
    check_window(cache, model)
