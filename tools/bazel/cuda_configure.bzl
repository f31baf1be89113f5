"""Points @cuda at an installed CUDA toolkit, or at an empty repository that says there is none."""

def _cuda_configure_impl(ctx):
    root = ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    present = ctx.path(root + "/bin/nvcc").exists
    if present:
        ctx.symlink(root, "toolkit")
        ctx.file("BUILD", """
package(default_visibility = ["//visibility:public"])
cc_library(name = "headers", hdrs = glob(["toolkit/include/**"]), includes = ["toolkit/include"])
cc_library(
    name = "cudart_static",
    srcs = ["toolkit/lib64/libcudart_static.a"],
    linkopts = ["-ldl", "-lrt", "-lpthread"],
    deps = [":headers"],
)
""")
    else:
        # buildifier: disable=print
        print("No CUDA toolkit under %s: CUDA targets are left out of this build." % root)
        ctx.file("BUILD", "")
    ctx.file("defs.bzl", "HAVE_CUDA = %s\nCUDA_ROOT = %r\n" % (present, root))

cuda_configure = repository_rule(
    implementation = _cuda_configure_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
