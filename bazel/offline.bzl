"""The rule sets that Bazel's own toolchains load, from this machine where Debian's packages brought them.

Bazel 4 declares pinned archives of rules_cc, rules_java, platforms and its coverage tools after the WORKSPACE, unless
the WORKSPACE declared them first. Debian's bazel-bootstrap comes with copies, so a build there needs no network; on
any other machine nothing is declared here, and Bazel fetches its own.
"""

_DEBIAN = "/usr/share/bazel/"

# Debian's own rules_cc does not load in its Bazel; only these names of it are loaded, and all are native rules.
_RULES_CC = """
cc_binary = native.cc_binary
cc_import = native.cc_import
cc_library = native.cc_library
cc_proto_library = native.cc_proto_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite
objc_library = native.objc_library
"""

_COVERAGE = """
filegroup(
    name = "coverage_report_generator",
    visibility = ["//visibility:public"],
)
"""

_DECLARE = """
def _stub_impl(ctx):
    for path, text in ctx.attr.files.items():
        ctx.file(path, text)

stub = repository_rule(_stub_impl, attrs = {{"files": attr.string_dict()}})

def declare_rules():
    if not {debian}:
        return
    native.local_repository(name = "platforms", path = "{root}tools/platforms")
    native.local_repository(name = "rules_java", path = "{root}rules/java")
    stub(name = "rules_cc", files = {{"BUILD": "", "cc/BUILD": "", "cc/defs.bzl": {rules_cc}}})
    stub(name = "remote_coverage_tools", files = {{"BUILD": {coverage}}})
"""

def _offline_rules_impl(ctx):
    # Debian's Bazel is the one that does not know its own version.
    debian = not native.bazel_version and ctx.path(_DEBIAN + "rules/java").exists
    ctx.file("BUILD")
    ctx.file("declare.bzl", _DECLARE.format(
        debian = debian,
        root = _DEBIAN,
        rules_cc = repr(_RULES_CC),
        coverage = repr(_COVERAGE),
    ))

offline_rules = repository_rule(_offline_rules_impl, local = True)
