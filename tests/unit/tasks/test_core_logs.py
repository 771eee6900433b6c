import logging
import warnings
from collections.abc import Iterator

import pytest
from prefect.logging.handlers import APILogHandler

from tasks.artifacts import LOGGERS, attach_api_log_handler


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    for logger in loggers:
        logger.handlers.clear()
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_lines_go_to_prefect_once_however_often_it_is_called() -> None:
    attach_api_log_handler()
    attach_api_log_handler()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        assert logger.isEnabledFor(logging.INFO)
        assert [type(handler) for handler in logger.handlers] == [APILogHandler]


def test_handler_of_prefects_own_settings_is_enough() -> None:
    handler = APILogHandler()
    logging.getLogger("tasks").addHandler(handler)
    attach_api_log_handler()
    assert logging.getLogger("tasks").handlers == [handler]


def test_finer_level_stays() -> None:
    logging.getLogger("virnuc_core").setLevel(logging.DEBUG)
    attach_api_log_handler()
    assert logging.getLogger("virnuc_core").level == logging.DEBUG


def test_line_outside_a_run_goes_nowhere() -> None:
    attach_api_log_handler()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logging.getLogger("virnuc_core.somewhere").info("no run to go to")
