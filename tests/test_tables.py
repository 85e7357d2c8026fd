from tnetcli.text import aligned, table


def test_no_name_and_no_value_is_cut_off_however_wide_the_table_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"a column of some width {number}" for number in range(30)]
    values = [f"{number} of 1234567890" for number in range(30)]
    title, _, head, _, row = table("title", names, [values]).splitlines()
    assert title == "title"
    assert [each.strip() for each in head.strip("|").split("|")] == names
    assert [each.strip() for each in row.strip("|").split("|")] == values


def test_a_table_is_no_wider_than_what_is_in_it():
    assert table("t", ("a", "b"), [("x", "1")]).splitlines()[2:] == [
        "| a | b |",
        "|---|---|",
        "| x | 1 |",
    ]


def test_facts_are_aligned_and_empty_ones_left_out():
    facts = [("a", "one"), ("long", ["two", "three"]), ("none", ""), ("b", "x\ny")]
    lines = aligned(facts)
    assert lines[:3] == ["  a     one", "  long  two", "        three"]
    assert len(lines) == 4
    assert "\n" not in lines[3]
    assert aligned([]) == []
