"""Fuzz targets: libFuzzer binaries under --config=fuzz, short deterministic tests otherwise."""

def cc_fuzz_test(name, srcs, corpus = [], deps = [], data = [], tags = [], **kwargs):
    """A cc_test over a source that defines LLVMFuzzerTestOneInput.

    Under a plain `bazel test` it runs every corpus file and a few thousand seeded mutations of them.
    For a real campaign:
      bazel build --config=fuzz //PACKAGE:NAME
      bazel-bin/PACKAGE/NAME -max_total_time=60 SCRATCH_FOLDER CORPUS_FOLDER

    Args:
      name: the target's name.
      srcs: sources; one of them defines LLVMFuzzerTestOneInput.
      corpus: files to start from, e.g. glob(["testdata/NAME/**"]).
      deps: libraries under test.
      data: other files read while running.
      tags: as of cc_test.
      **kwargs: passed on to cc_test.
    """
    native.cc_test(
        name = name,
        srcs = srcs,
        args = ["$(locations %s)" % file for file in corpus],
        data = data + corpus,
        deps = deps + ["//tools/bazel:fuzz_driver"],
        size = "small",
        tags = tags + ["fuzz"],
        **kwargs
    )
