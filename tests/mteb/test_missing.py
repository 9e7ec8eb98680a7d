"""Without MTEB, importing `retrieval_mteb` says what to install."""


def test_the_error_names_the_extra(process):
    code = (
        "import sys; sys.modules['mteb'] = None\n"
        "from retrieval.errors import MissingDependency\n"
        "try: import retrieval_mteb\n"
        "except MissingDependency as error: print(error)"
    )
    done = process("-c", code)
    assert done.code == 0, done.err
    assert "needs mteb" in done.out and "'embedding-retrieval[mteb]'" in done.out
