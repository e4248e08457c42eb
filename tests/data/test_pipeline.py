import itertools
import json

import pytest

from rl_posttrain.data.pipeline import make_iterator


def take(iterator, count):
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize("batch_size", [1, 4, 10])
def test_o25_a_resumed_iterator_reads_what_the_unbroken_one_reads(batch_size):
    make = lambda: make_iterator(range(10), batch_size=batch_size, seed=7, epochs=3)
    unbroken = list(make())
    assert sorted(sum(unbroken, [])) == sorted(list(range(10)) * 3)
    for stop in range(len(unbroken) + 1):
        stopped = make()
        read = take(stopped, stop)
        state = json.loads(json.dumps(stopped.get_state()))
        resumed = make()
        take(resumed, 2)  # an iterator that has moved must forget where it was
        resumed.set_state(state)
        assert read + list(resumed) == unbroken, f"stopped after step {stop}"


def test_every_epoch_holds_every_item_once_in_another_order():
    epochs = take(make_iterator(range(20), batch_size=20, seed=0), 4)
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(20)) not in epochs


def test_neighbouring_seeds_share_no_order():
    orders = [tuple(e) for seed in range(3) for e in take(make_iterator(range(20), batch_size=20, seed=seed), 3)]
    assert len(set(orders)) == 9


def test_the_order_depends_on_the_seed_alone():
    first, second = (take(make_iterator(range(50), batch_size=8, seed=3), 9) for _ in range(2))
    assert first == second


def test_o24_fewer_items_than_a_batch_make_full_steps():
    iterator = make_iterator(["a", "b", "c"], batch_size=8, seed=0)
    for batch in take(iterator, 3):
        assert len(batch) == 8 and set(batch) == {"a", "b", "c"}


def test_o24_one_pass_over_fewer_items_than_a_batch_reads_them_all():
    assert [sorted(b) for b in make_iterator(["a", "b", "c"], batch_size=8, seed=0, epochs=1)] == [["a", "b", "c"]]
    assert sum(map(len, make_iterator(range(11), batch_size=4, seed=0, epochs=1))) == 11


def test_o24_no_items_are_refused():
    with pytest.raises(ValueError, match="no items"):
        make_iterator([], batch_size=8, seed=0)


def test_mixtures_keep_their_proportions_and_resume():
    make = lambda: make_iterator(
        {"many": [f"m{i}" for i in range(7)], "few": ["f0", "f1"]},
        {"many": 3, "few": 1},
        batch_size=8,
        seed=1,
    )
    unbroken = take(make(), 12)
    assert all(sum(item[0] == "m" for item in batch) == 6 for batch in unbroken)
    stopped = make()
    take(stopped, 5)
    resumed = make()
    resumed.set_state(json.loads(json.dumps(stopped.get_state())))
    assert take(resumed, 7) == unbroken[5:]


def test_a_mixture_does_not_depend_on_the_order_of_the_mapping():
    a, b = list(range(9)), list(range(100, 105))
    assert take(make_iterator({"a": a, "b": b}, batch_size=4, seed=0), 5) == take(
        make_iterator({"b": b, "a": a}, batch_size=4, seed=0), 5
    )


def test_items_are_handed_over_as_they_are():
    items = [None, {"a": [1]}, (2, 3)]
    (batch,) = make_iterator(items, batch_size=3, seed=0, epochs=1)
    assert all(any(x is item for x in batch) for item in items)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ([1], {"batch_size": 0}, "batch_size=0"),
        ([1], {"epochs": 0}, "epochs=0"),
        ([1], {"seed": -1}, "seed=-1"),
        ([1], {"weights": {"a": 1.0}}, "several sources"),
        ({"a": [1]}, {"epochs": 2}, "epochs=2"),
        ({"a": [1]}, {"weights": {"b": 1.0}}, "same names"),
        ({"a": [1], "b": [2]}, {"weights": {"a": 1.0, "b": 0.0}}, "positive"),
        ({"a": [1], "b": []}, {}, "'b' has no items"),
        ({}, {}, "same names"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused(source, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_iterator(source, **{"batch_size": 2, "seed": 0, **arguments})
