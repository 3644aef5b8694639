"""Files of strangers are read within limits: size, depth, parts with those of aliases, and integers."""

import pytest

from t2r.errors import T2RError
from t2r.storage import parse_json, parse_yaml, read_inside, read_json, read_text

DOUBLED = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], y{i}: 1}}\n" for i in range(1, 60))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(DOUBLED, "more than 100,000 parts, with those of its aliases", id="a billion laughs"),
        pytest.param(MERGED, "more than 100,000 parts", id="merged mappings"),
        pytest.param("a: &a [1, *a]", "an alias that contains itself: *a", id="an alias in itself"),
        pytest.param("a: &a {b: {c: *a}}", "an alias that contains itself: *a", id="an alias in itself, deeper"),
        pytest.param("[" * 1_000_000, "more than 50 levels", id="a million levels"),
        pytest.param("- " * 100_000, "more than 50 levels", id="levels of a block"),
        pytest.param("x: " + "[1, " * 51 + "2" + "]" * 51, "more than 50 levels", id="51 levels"),
        pytest.param("x" * 2_000_000, "more than 1,048,576 characters", id="two megabytes"),
        pytest.param(f"a: {2**70}", "an integer of more than 64 bits", id="an integer"),
        pytest.param("a: 0x" + "f" * 100_000, "an integer of more than 64 bits", id="a long integer"),
        pytest.param("a: " + "9" * 5000, "is not valid YAML", id="an integer of 5,000 digits"),
        pytest.param("? [a, b]\n: c", "is not valid YAML", id="a list as a key"),
        pytest.param("a: *b", "is not valid YAML", id="an unknown alias"),
        pytest.param("a: !!python/object/apply:os.system [id]", "is not valid YAML", id="an object"),
        pytest.param("a: \0", "is not valid YAML", id="a null character"),
    ],
)
def test_yaml_beyond_limits_is_refused(text, says):
    with pytest.raises(T2RError) as error:
        parse_yaml(text, "the file")
    assert says in str(error.value)
    assert len(str(error.value)) < 500


def test_yaml_with_aliases_is_read():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]", "it") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": 2},
        "c": [{"x": 1}, {"x": 1}],
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("[" * 10_000 + "]" * 10_000, "", id="10,000 levels"),
        pytest.param('{"a":' * 60 + "1" + "}" * 60, "more than 50 levels", id="60 levels"),
        pytest.param("9" * 5000, "cannot be read as JSON", id="an integer of 5,000 digits"),
        pytest.param(f"[{2**64}]", "an integer of more than 64 bits", id="an integer"),
        pytest.param("{", "cannot be read as JSON", id="cut"),
        pytest.param("", "cannot be read as JSON", id="empty"),
    ],
)
def test_json_beyond_limits_is_refused(text, says):
    with pytest.raises(T2RError, match="the file") as error:
        parse_json(text, "the file")
    assert says in str(error.value)


def test_infinite_numbers_are_none():
    assert parse_json("[NaN, -Infinity, 1e999, 1.5, 2]", "it") == [None, None, None, 1.5, 2]


def test_a_file_has_a_largest_size(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[1, 2]")
    assert read_json(path) == [1, 2]
    with pytest.raises(T2RError, match="more than 5 bytes"):
        read_json(path, 5)
    path.write_bytes(b"\xff")
    with pytest.raises(T2RError, match="'utf-8' codec"):
        read_json(path)
    with pytest.raises(T2RError, match="is not a file"):
        read_text("/dev/zero", 10)
    with pytest.raises(T2RError, match="No such file"):
        read_json(tmp_path / "none")


def test_files_outside_of_a_folder_are_not_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    folder = tmp_path / "folder"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "file").write_text("inside")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "good").symlink_to("in/file")
    assert read_inside(folder, "in/file") == read_inside(folder, "good") == "inside"
    assert read_inside(folder, "none") is None
    for name in ("link", "../secret", tmp_path / "secret", "/proc/self/environ"):
        with pytest.raises(T2RError, match="is outside of"):
            read_inside(folder, name)
