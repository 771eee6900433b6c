"""Runs with Postgres as the server's database, as docs/deployment.md recommends for several hosts."""

import asyncio
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.production.conftest import free_port, running_stack, same_results

pytestmark = pytest.mark.slow

BINARIES = [Path(found).parent for found in [shutil.which("initdb")] if found] + sorted(
    Path("/usr/lib/postgresql").glob("*/bin"), reverse=True
)


@pytest.fixture
def database() -> Iterator[str]:
    """Address of an empty database, for Prefect's settings."""
    if not BINARIES:
        pytest.skip("Postgres is not installed (initdb is neither on the PATH nor in /usr/lib/postgresql)")
    # Postgres does not run as root, who may take any other user's name.
    user = "nobody" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    folder = Path(tempfile.mkdtemp(prefix="virnuc-postgres-"))
    shutil.chown(folder, user)
    port = free_port()

    def run(program: str, *arguments: str) -> None:
        command = [BINARIES[0] / program, "--pgdata", folder / "data", *arguments]
        done = subprocess.run(command, user=user, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run("initdb", "--username=virnuc", "--auth=trust", "--no-sync")
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
        run("pg_ctl", "--wait", f"--log={folder / 'log'}", f"--options={options}", "start")
        try:
            yield f"postgresql+asyncpg://virnuc@127.0.0.1:{port}/postgres"
        finally:
            run("pg_ctl", "--mode=immediate", "stop")
    finally:
        shutil.rmtree(folder)


def test_a_run_in_the_pool(database: str, genomes: Path, local_run: Path, tmp_path: Path) -> None:
    with running_stack(tmp_path, PREFECT_API_DATABASE_CONNECTION_URL=database) as stack:
        run_id = stack.ask(inputs=[str(genomes)], out=str(tmp_path / "run"))
        stack.wait_for(run_id, "Completed")
        lanes = stack.lanes(run_id)
        assert len(lanes) > 1
        assert asyncio.run(_names_of_runs(database)) >= {run.name for run in lanes}
    assert same_results(tmp_path / "run", local_run)


async def _names_of_runs(database: str) -> set[str]:
    connection = await asyncpg.connect(database.replace("+asyncpg", ""))
    try:
        return {row["name"] for row in await connection.fetch("SELECT name FROM flow_run")}
    finally:
        await connection.close()
