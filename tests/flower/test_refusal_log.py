"""A site's log has lines for the first, second, fourth, and so on, of refusals with the same reason."""

from fedbilevel.flower.client.refusals import RefusalLog


def test_errors_of_two_kinds_without_a_text_are_two_reasons(caplog):
    log = RefusalLog()
    for error in (MemoryError(), KeyError(), MemoryError(), KeyError()):
        log.refusal(0, error, "request 1")
    assert len(caplog.records) == 4  # the first and the second of each
    log.refusal(0, MemoryError(), "request 1")
    assert len(caplog.records) == 4
