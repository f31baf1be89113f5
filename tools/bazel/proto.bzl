"""C++ messages and gRPC stubs from one .proto, with Debian's protoc."""

def grpc_proto_library(name, src, deps = [], imports = [], visibility = None):
    """Generates name.pb.{h,cc} and name.grpc.pb.{h,cc} and compiles them.

    Args:
      name: the cc_library's name.
      src: the .proto file, in this package.
      deps: grpc_proto_library targets of the imported files.
      imports: labels of the imported .proto files.
      visibility: as usual.
    """
    base = src[:-len(".proto")]
    native.genrule(
        name = name + "_gen",
        srcs = [src] + imports,
        outs = [base + s for s in [".pb.h", ".pb.cc", ".grpc.pb.h", ".grpc.pb.cc"]],
        cmd = "protoc -I. --cpp_out=$(GENDIR) --grpc_out=$(GENDIR) " +
              "--plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin $(location " + src + ")",
    )
    native.cc_library(
        name = name,
        srcs = [base + ".pb.cc", base + ".grpc.pb.cc"],
        hdrs = [base + ".pb.h", base + ".grpc.pb.h"],
        copts = ["-Wno-unused-parameter", "-O1"],
        deps = deps + ["@system//:grpc", "@system//:absl"],
        visibility = visibility,
    )
