from scripts.render_tutorial import run, stable, steps

PAGE = """
```sh
not run
```

```bash
echo one
cat <<END
two
END
```

Words.

```text
old
```

```python
x = 3
```

```python
print(x + 1)
```

```text
4
```
"""


def test_blocks_are_run_in_order_and_know_what_the_page_shows() -> None:
    found = list(steps(PAGE))
    assert [step.mark for step in found] == ["bash", "python", "python"]
    assert [step.shown for step in found] == ["old\n", None, "4\n"]
    assert PAGE[slice(*found[0].place)] == "old\n"
    names: dict[str, object] = {}
    assert [run(step, names) for step in found] == ["one\ntwo\n", "", "4\n"]


def test_speeds_and_hashes_are_no_differences() -> None:
    line = "12 sequences/s, 1,234.5 residues/s, " + "0af9" * 16
    assert stable(line) == "N sequences/s, N residues/s, HASH"
