"""Which rank gets the next request."""

from api.load_balancer import RankLoad, choose


def test_rank_with_least_waiting_running_and_sent_is_chosen() -> None:
    """All three counts weigh the same."""
    loads = [RankLoad(2, 1, 0), RankLoad(0, 0, 4), RankLoad(1, 1, 0)]
    for load in loads:
        load.is_up = True

    assert choose(loads) == 2


def test_rank_that_is_down_is_never_chosen() -> None:
    """However little it has to do; and with none up there is no choice."""
    loads = [RankLoad(is_up=False), RankLoad(9, 9, 9)]

    assert choose(loads) == 1
    assert choose([RankLoad(is_up=False)]) is None


def test_equal_ranks_are_taken_in_turn() -> None:
    """What was sent counts at once, so a burst between two reports is spread."""
    loads = [RankLoad(), RankLoad(), RankLoad()]
    chosen = []
    for _ in range(6):
        rank = choose(loads)
        assert rank is not None
        loads[rank].num_unreported += 1
        chosen.append(rank)

    assert chosen == [0, 1, 2, 0, 1, 2]


def test_report_replaces_what_was_sent() -> None:
    """The rank's own counts stand for all that was sent before they came."""
    load = RankLoad(num_unreported=3)

    load.report(num_waiting=1, num_running=2)

    assert (load.score, load.num_unreported) == (3, 0)
