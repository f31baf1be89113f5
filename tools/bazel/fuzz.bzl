"""Fuzz targets: libFuzzer binaries under --config=fuzz, short deterministic tests otherwise."""

def cc_fuzz_test(name, srcs, deps = [], data = [], tags = [], **kwargs):
    """A cc_test over a source that defines LLVMFuzzerTestOneInput.

    The corpus to start from is what lies in testdata/NAME of the package; none is an error. Under a
    plain `bazel test` every file of it runs and a few thousand seeded mutations of them. For a real
    campaign:
      bazel build --config=fuzz //PACKAGE:NAME
      bazel-bin/PACKAGE/NAME -max_total_time=60 SCRATCH_FOLDER PACKAGE/testdata/NAME

    Args:
      name: the target's name.
      srcs: sources; one of them defines LLVMFuzzerTestOneInput.
      deps: libraries under test.
      data: other files read while running.
      tags: as of cc_test.
      **kwargs: passed on to cc_test.
    """
    corpus = native.glob(["testdata/%s/**" % name], allow_empty = False)
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
