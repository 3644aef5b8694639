"""Sentences of a corpus with tagged words."""

from t2r.data.tagged import prepare, sentences


def test_words_are_joined_to_sentences_without_tags_brackets_and_wide_digits(tmp_path):
    text = (
        "19980101-01-001-002/m  １２月/t  ３１日/t  ，/w  [中央/n  人民/n  广播/vn  电台/n]nt  播出/v  “/w"
        "  讲话/n  。/w  ”/w  １／２/m  的/u  听众/n  ＡＢＣ/nx  收听/v  ！/w\n"
        "兰/nr  红光/nr  摄/Vg\n"
        "\n"
    )
    expected = ["12月31日，中央人民广播电台播出“讲话。”", "1／2的听众ABC收听！"]
    assert list(sentences(text.splitlines())) == expected  # the short name is left out
    source, out = tmp_path / "199801.txt", tmp_path / "news.zh"
    source.write_text(text, encoding="utf-8")
    prepare(str(source), out)
    assert out.read_text(encoding="utf-8").splitlines() == expected
