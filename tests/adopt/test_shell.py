"""The shell reader gives the words that bash would give, with their lines, and runs nothing."""

from pathlib import Path

import pytest

from megacore.adopt.shell import Script, flags_of, read_script
from megacore.errors import ConfigError


def script_of(tmp_path: Path, text: str, **given: str) -> Script:
    path = tmp_path / "train.sh"
    path.write_text(text)
    return read_script(path, given)


def words_of(tmp_path: Path, text: str, **given: str) -> list[str]:
    script = script_of(tmp_path, text, **given)
    return [word.text for word in script.launches[0].arguments]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1\npython t.py --a $A ${A}2 '$A' \"$A b\"", ["--a", "1", "12", "$A", "1 b"]),
        ("A='--x 1\n --y 2'\npython t.py $A", ["--x", "1", "--y", "2"]),
        ('A=(--x 1)\nA+=(--y "2 3")\npython t.py ${A[@]}', ["--x", "1", "--y", "2", "3"]),
        ('A=(--x "2 3")\npython t.py "${A[@]}"', ["--x", "2 3"]),
        ('A=a\nA+=b\nA="$A c"\npython t.py $A', ["ab", "c"]),
        ("python t.py ${A:-d} ${B-e} ${C:+f}", ["d", "e"]),
        ("A=2\nB=$((A * 3 + ${A} / 2))\npython t.py $B $((2 ** 3)) $((7 % 4))", ["7", "8", "3"]),
        (
            "A=x/y.json\npython t.py ${A##*/} ${A%.json} ${A/x/z} ${#A}",
            ["y.json", "x/y", "z/y.json", "8"],
        ),
        ("python t.py $((-7 % 3)) $((7 % -3)) $((-7 / 3))", ["-1", "1", "-2"]),
        ("P=ab\ncase ab in $P) X=1;; *) X=2;; esac\npython t.py $X", ["1"]),
        ("declare -i A=2+3\nunset A\nA=2+3\npython t.py $A", ["2+3"]),
        ("declare -x -i A=2+3\npython t.py $A", ["5"]),
        ("declare -i A=1\ndeclare +i A\nA=2+3\npython t.py $A", ["2+3"]),
        ("f() { local -i A=2*3; }\nf\nA=2*3\npython t.py $A", ["2*3"]),
        (
            "A=b\nB=ab\npython t.py ${B%$A} ${B/a*/X} ${B/#a/X}",
            ["${B%$A}", "${B/a*/X}", "${B/#a/X}"],
        ),
        ("python t.py --a \\\n  1 \\\n  --b 2 # comment", ["--a", "1", "--b", "2"]),
        ("if [ $# -gt 0 ]; then A=1; else A=2; fi\npython t.py $A", ["2"]),
        ('A=true\nif [[ "$A" == "true" && 1 -lt 2 ]]; then B=1; fi\npython t.py $B', ["1"]),
        ("A=b\ncase $A in a) B=1;; b|c) B=2;; *) B=3;; esac\npython t.py $B", ["2"]),
        ('f() { local X=$1; Y="$X!"; }\nf q\npython t.py $Y', ["q!"]),
        (
            "A=''\nfor i in 1 2 3; do A=\"$A --n $i\"; done\npython t.py $A",
            ["--n", "1", "--n", "2", "--n", "3"],
        ),
        ('C="python t.py --a 1 &> log.txt"\neval $C', ["--a", "1"]),
        ('C="python -u t.py --a 1"\nsrun -l --output=x sh -c "$C"', ["--a", "1"]),
        ("i=1\n((i++))\nlet i=i+5\npython t.py $i", ["7"]),
        ("sbatch <<EOT\n#!/bin/bash\nsrun python t.py --a 1\nEOT", ["--a", "1"]),
        ('D=$(dirname "x/y/z.sh")\npython t.py $D', ["x/y"]),
        ('C="python t.py --a \'1 2\' --b \\"3\\""\neval $C', ["--a", "1 2", "--b", "3"]),
        ("export A=1\nsrun bash -c 'python t.py --a $A \"b c\"'", ["--a", "1", "b c"]),
        ("python t.py ${A:-0.3 /a 0.7 /b}", ["0.3", "/a", "0.7", "/b"]),
        ('A="${A:-0.3 /a}"\npython t.py "$A"', ["0.3 /a"]),
        ('A=(1 2 3)\npython t.py ${A[@]:1} "${A[@]:0:2}"', ["2", "3", "1", "2"]),
        ('A=(--x "1 2")\npython t.py "${A[@]+"${A[@]}"}"', ["--x", "1 2"]),
        ('A=(1 2)\npython t.py ${A[@]:-9} ${B[@]:-9} "${B[@]:-}"', ["1", "2", "9"]),
        ("A=(1 2 3)\nA[1]=7\npython t.py ${A[@]} $((${#A[@]} * 2))", ["1", "7", "3", "6"]),
        ('f() { A=$1; shift; python t.py $A $1 "$@"; }\nf 1 2 3', ["1", "2", "2", "3"]),
        ('f() { shift 2; python t.py "$@"; }\nf 1 2 3', ["3"]),
        ("f() { if [ $1 = x ]; then A=1; return; fi; A=2; }\nf x\npython t.py $A", ["1"]),
        ("for i in 1 2 3; do A=$i; if [ $i = 2 ]; then break; fi; done\npython t.py $A", ["2"]),
        (
            "A=x\nfor i in 1 2; do if [ $i = 1 ]; then continue; fi; A=$A$i; done\npython t.py $A",
            ["x2"],
        ),
        ("A=1\nf() { local A=2; }\nf\n(A=3)\npython t.py $A", ["1"]),
        ("A=1\nunset A\npython t.py ${A:-2}", ["2"]),
        ('A=1\ntest -z "$A" && A=2\npython t.py $A', ["1"]),
        ("A=true\nif $A; then B=1; fi\npython t.py $B", ["1"]),
        ('set -- 8 9\nset -- --a $1 "$@"\npython t.py $@ $#', ["--a", "8", "8", "9", "4"]),
        ("set -euo pipefail\nset a\npython t.py $1", ["a"]),
        ('set -x c -- d\npython t.py "$@"', ["c", "--", "d"]),
        ('set -euo pipefail a b\nset +x\npython t.py "$@"', ["a", "b"]),
        ('set - a "b c"\npython t.py "$@"', ["a", "b c"]),
        ("f() { python t.py ${10}; }\nf 1 2 3 4 5 6 7 8 9 x", ["x"]),
        ('read -r A B <<< "1 2 3"\npython t.py "$B" $A', ["2 3", "1"]),
        ("IFS=, read -ra A <<< 7,8\npython t.py ${A[1]} ${#A[@]}", ["8", "2"]),
        (
            "case ab in a*) A=1;;& x) B=2;; *b) C=3;& y) D=4;; *) E=5;; esac\n"
            + "python t.py $A $C $D",
            ["1", "3", "4"],
        ),
        ("declare -i A=3+4\nA+=1\nA=A*2\npython t.py $A", ["16"]),
        ("read -r -d '' A <<EOF\n--x 1\n--y 2\nEOF\npython t.py $A", ["--x", "1", "--y", "2"]),
        ("B=7\nread -rd '' A <<EOF\n --x $B \\\n --y\nEOF\npython t.py \"$A\"", ["--x 7  --y"]),
        ("read -r A B <<'EOF'\n1 $2\n3\nEOF\npython t.py $A \"$B\"", ["1", "$2"]),
        (
            "python t.py $((010 + 0x10)) $((1 << 4)) $((-9 >> 1)) $((2+1<<3-1))",
            ["24", "16", "-5", "12"],
        ),
        (
            "A=3\npython t.py $((A > 2 ? 5 : 6)) $((0 ? 1 : A == 3 ? 7 : 8)) $(((A) > 9 ? 1 : 2))",
            ["5", "7", "2"],
        ),
        (
            "A=abcdef\npython t.py ${A:0:2} ${A:2} ${A: -2} ${A:1:-1} ${A::3} x${A:9}",
            ["ab", "cdef", "ef", "bcde", "abc", "x"],
        ),
        (
            'python t.py $(seq 3) "$(seq 2 3)" `seq 5 -2 1` x$(seq 2 1)',
            ["1", "2", "3", "2\n3", "5", "3", "1", "x"],
        ),
        ("A=''\nfor i in $(seq 2); do A=$A$i; done\npython t.py $A", ["12"]),
        ("python t.py ${Y:-\"a b\"} ${Z:-'c d' e}", ["a b", "c d", "e"]),
        ("if python t.py --a 1; then echo; fi", ["--a", "1"]),
        ("if ! python t.py --a 1; then exit 1; fi", ["--a", "1"]),
        ("until python t.py --a 1; do sleep 1; done", ["--a", "1"]),
        ("N=0\nuntil [ $N -ge 3 ]; do N=$((N+1)); done\npython t.py $N", ["3"]),
        ("until [ -f done ]; do python t.py --a 1; done", ["--a", "1"]),
        ("A=1 B=$((A+1))\npython t.py $A $B", ["1", "2"]),
        ("A=1\nA=2 python t.py $A", ["1"]),
        ("f() { python t.py $A; }\nA=1\nA=2 f", ["2"]),
        (
            "A=a B=b\nC=$A/$B/c\nexport D=${A}/$B.d\npython t.py $C $D --x=$A/$B/e",
            ["a/b/c", "a/b.d", "--x=a/b/e"],
        ),
        ("N=1\n((N == 2))\npython t.py $N", ["1"]),
        ("python t.py --a 1 \\\n  `# why` --b 2", ["--a", "1", "--b", "2"]),
        (
            "A=$'--x 1\\n--y 2'\npython t.py $A $'a\\tb' $'it\\'s'",
            ["--x", "1", "--y", "2", "a\tb", "it's"],
        ),
        (
            "for i in 1 2; do for j in 3 4; do break 2; done; A=5; done\npython t.py $i $j ${A:-6}",
            ["1", "3", "6"],
        ),
        (
            "for i in 1 2; do for j in 3 4; do A+=$j; continue 2; done; done\npython t.py $A",
            ["33"],
        ),
        ("A[0]=1\nA[1]=2\npython t.py ${A[@]}", ["1", "2"]),
        ("A=$(echo 1; echo 2)\npython t.py $A", ["$(echo 1; echo 2)"]),
        ("python t.py $((10#08))", ["$((10#08))"]),
    ],
)
def test_words_are_those_of_bash(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert words_of(tmp_path, text) == expected


def test_home_directory_is_that_of_the_user_or_the_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'A=~/a\npython t.py $A ~ ~/b $HOME/c "$HOME/d" \'~/e\' "~/f" \\~/g h~/i ~j/k'
    kept = ["~/e", "~/f", "~/g", "h~/i", "~j/k"]
    monkeypatch.setenv("HOME", "/h/me")
    home = ["/h/me/a", "/h/me", "/h/me/b", "/h/me/c", "/h/me/d"]
    assert words_of(tmp_path, text) == [*home, *kept]
    given = ["/x/a", "/x", "/x/b", "/x/c", "/x/d"]
    assert words_of(tmp_path, text, HOME="/x") == [*given, *kept]


def test_each_word_names_its_line(tmp_path: Path) -> None:
    script = script_of(
        tmp_path, 'A="\n --x 1\n --y 2 "\nB=(\n --z\n 3)\npython t.py $A ${B[@]} --w\n'
    )
    lines = {setting.name: setting.place.line for setting in flags_of(script.launches[0].arguments)}
    assert lines == {"--x": 2, "--y": 3, "--z": 5, "--w": 7}


def test_placeholders_and_arguments_have_no_value_and_stay_as_written(tmp_path: Path) -> None:
    script = script_of(tmp_path, "A=<Specify path>/b.json\nC=$1 #<path>\npython t.py --a $A --c $C")
    settings = list(flags_of(script.launches[0].arguments))
    assert [(s.name, s.words, s.unknown) for s in settings] == [
        ("--a", ["<Specify path>/b.json"], True),
        ("--c", ["$1"], True),
    ]
    assert script.hints == {"C": "<path>"}


def test_given_values_replace_variables_arguments_and_assignments(tmp_path: Path) -> None:
    text = "N=$(nvidia-smi | wc -l)\npython t.py $1 $N $OUTSIDE"
    path = tmp_path / "train.sh"
    path.write_text(text)
    script = read_script(path, {"1": "a", "N": "8", "OUTSIDE": "b"})
    assert [word.text for word in script.launches[0].arguments] == ["a", "8", "b"]


def test_sourced_and_called_scripts_see_the_variables(tmp_path: Path) -> None:
    (tmp_path / "config.sh").write_text('export FLAGS=" --size ${SIZE} "\n')
    (tmp_path / "job.sh").write_text(
        'CMD="python -u $CODE/pretrain.py ${FLAGS}"\nsrun sh -c "${CMD}"\n'
    )
    text = "SIZE=3\nCODE=/code\n. `pwd`/config.sh\nsbatch --export=FLAGS job.sh\nexit 0\n"
    script = script_of(tmp_path, text)
    assert script.launches[0].program == "/code/pretrain.py"
    assert [word.text for word in script.launches[0].arguments] == ["--size", "3"]


@pytest.mark.parametrize(
    "call",
    ["A=2 bash run.sh", "env A=2 bash run.sh", "A=2 . run.sh", "sbatch --export=ALL,A=2 run.sh"],
)
def test_a_called_script_sees_the_variables_of_its_command(tmp_path: Path, call: str) -> None:
    (tmp_path / "run.sh").write_text("python t.py ${A:-1}")
    assert words_of(tmp_path, f"{call}\n") == ["2"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("python t.py x{a,b}.bin", "the brace expansion x{a,b}.bin"),
        ("for i in {1..3}; do B=$i; done", "the brace expansion {1..3}"),
        ("B=({1..3})", "the brace expansion {1..3}"),
        ("unset A[1]", "unset A[1]"),
        ("A[5]=y", "A[5]=y"),
        ("B=([2]=z [0]=x)", "B=([2]=z [0]=x)"),
        ("IFS=,", "IFS=,"),
        ('IFS=, read -r B C <<< "x y,2"', 'IFS=, read -r B C <<< "x y,2"'),
        ('read -d x B <<< "1 2"', 'read -d x B <<< "1 2"'),
        ('mapfile -t B <<< "1"', 'mapfile -t B <<< "1"'),
        ("case q in $(hostname)) B=1;; esac", "$(hostname)) B=1;;"),
    ],
)
def test_what_bash_reads_differently_is_named(tmp_path: Path, line: str, shown: str) -> None:
    script = script_of(tmp_path, f"A=(x y z)\n{line}\npython t.py")
    assert script.remarks == [f"train.sh:2: {shown} is not read"]


def test_braces_that_bash_keeps_are_no_brace_expansion(tmp_path: Path) -> None:
    text = 'mkdir -p out/{a,b}\npython t.py \'{"a":1,"b":2}\' "{a,b}" ${A:-x,y} {a} {} \\{a,b}'
    assert script_of(tmp_path, text).remarks == []


def test_a_statement_that_is_not_read_is_named(tmp_path: Path) -> None:
    script = script_of(tmp_path, "for ((i=0; i<3; i++)); do A=$i; done\npython t.py $A")
    assert script.remarks == ["train.sh:1: for ((i=0; i<3; i++)); do A=$i; done is not read"]


@pytest.mark.parametrize("end", ["\\ ", "\\\n # why"])
def test_flags_after_a_line_that_ends_their_command_are_named(tmp_path: Path, end: str) -> None:
    script = script_of(tmp_path, f"python t.py --a 1 {end}\n  --b 2\n")
    (remark,) = script.remarks
    assert "--b 2 belongs to no command: end the line before it with \\" in remark


def test_text_that_is_no_shell_syntax_is_named(tmp_path: Path) -> None:
    script = script_of(tmp_path, "python t.py --a (1) --b 2\n")
    assert script.remarks == ["train.sh:1: (1) -- is not read"]


def test_files_that_a_script_writes_are_read(tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text('{"a": AA, "b": BB}')
    text = (
        'A=1\ncat <<EOT > $A.json\n{"a": $A}\nEOT\n'
        'sed "s/AA/${A}/" template.json | sed "s/BB/true/" > other.json\n'
    )
    script = script_of(tmp_path, text)
    assert script.variables.files == {"1.json": '{"a": 1}\n', "other.json": '{"a": 1, "b": true}'}


def test_a_condition_on_the_machine_counts_as_false_with_a_remark(tmp_path: Path) -> None:
    script = script_of(tmp_path, "if [ -d /data ]; then A=1; else A=2; fi\npython t.py $A")
    assert [word.text for word in script.launches[0].arguments] == ["2"]
    assert "train.sh:1" in script.remarks[0]
    assert "[ -d /data ]" in script.remarks[0]


def test_a_side_after_a_condition_on_the_machine_is_left_out_with_a_remark(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        "A=1\n[ -d /data ] && A=2\n[[ -f /done ]] && exit 0\ncd /code && B=3\npython t.py $A $B",
    )
    assert [word.text for word in script.launches[0].arguments] == ["1", "3"]
    assert [remark.split()[0] for remark in script.remarks] == ["train.sh:2:"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ('[ "$P" = bf16 -a "$N" = 1 ]', True),
        ('[ "$P" = fp32 -o "$N" = 1 ]', True),
        ('[ -z "$Q" -a "$N" -gt 1 ]', False),
        ('[ ! "$P" = fp32 ]', True),
        ("[ ! $N -eq 1 ]", False),
        ("[[ ! $P == fp32 ]]", True),
        ("[[ $P = bf16 || $P = fp16 ]]", True),
        ("[[ $P = fp16 && $N = 1 || $N = 2 ]]", False),
        ("[[ $P == [bf]* && ! ( $N == 2 ) ]]", True),
        ('[[ $P == "b*" ]]', False),
        ('[[ ${P} == *"fp"* ]]', False),
        ('[[ ${Q} == *"fp"* || $P == b* ]]', True),
        ("[[ ($P == bf16)&&($N == 2 ||$N == 1) ]]", True),
        ("[ -n $Q ]", True),
        ('[ -n "$Q" ]', False),
        ("[ $Q != 1 ]", False),
        ("[[ $Q != 1 ]]", True),
        ("[ $N = 1 -a \\\n $P = bf16 ]", True),
        ("[ ! $Q ]", True),
        ('[[ 0 = [bf]f16 || "$P" ]]', True),
        ("(( N == 1 && 2 > N ))", True),
    ],
)
def test_conditions_have_the_outcome_of_bash(
    tmp_path: Path, condition: str, expected: bool
) -> None:
    text = f"P=bf16; N=1; A=no\nif {condition}; then A=yes; fi\npython t.py $A"
    script = script_of(tmp_path, text)
    assert [word.text for word in script.launches[0].arguments] == ["yes" if expected else "no"]
    assert script.remarks == []


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    script_of(tmp_path, f"touch {target}\nA=$(touch {target})\n`touch {target}`\n(( A = 1 ))\n")
    assert not target.exists()


def test_an_endless_loop_ends(tmp_path: Path) -> None:
    assert words_of(tmp_path, "while true; do A=1; done\npython t.py $A") == ["1"]
    inner = "for i in $N; do for j in $N; do A=1; done; done"
    with pytest.raises(ConfigError, match="loops of more than 50,000 statements"):
        script_of(tmp_path, f"N='1 2 3 4 5 6 7 8 9'\nwhile true; do {inner}; done")


@pytest.mark.parametrize(
    "text", ["if [ -z ${A}]; then", "A=(((", "$((", "`", '"', "<<", "x() {", ""]
)
def test_broken_scripts_are_read_as_far_as_possible(tmp_path: Path, text: str) -> None:
    assert script_of(tmp_path, text).launches == []
