// A node for tests of the broker: a fresh folder with a tiny model, secrets and a configuration for
// its tenants.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_TEST_NODE_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_TEST_NODE_H_

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/testing/eventually.h"
#include "worker/model/testing.h"

namespace palimpsest {

class TestNode {
 public:
  // The model's image has 4 slabs of 2 MiB, its longest sequence fits one.
  static constexpr int kImageSlabs = 4;

  // With more layers the image has as many more slabs.
  explicit TestNode(int layers = kImageSlabs - 2,
                    std::vector<std::string> tenants = {"alpha", "beta"})
      : tenants_(std::move(tenants)) {
    // Not under the test's folder: the path of a Unix socket has at most 107 bytes.
    std::string pattern = "/tmp/palimpsest_test_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    mkdir(model().c_str(), 0755);
    ModelConfig config = TinyModelConfig();
    config.num_layers = layers;
    const absl::Status written = WriteRandomModel(model(), config);
    if (!written.ok()) abort();
    for (const std::string& tenant : tenants_) {
      if (!WriteFileAtomically(absl::StrCat(folder_, "/", tenant), Secret(tenant), 0600).ok()) {
        abort();
      }
    }
  }
  ~TestNode() {
    if (!kept_) std::filesystem::remove_all(folder_);
  }
  TestNode(const TestNode&) = delete;
  TestNode& operator=(const TestNode&) = delete;

  const std::string& folder() const { return folder_; }
  // Leaves the folder for people to look at.
  void Keep() { kept_ = true; }
  std::string model() const { return folder_ + "/model"; }
  std::string control() const { return folder_ + "/broker.sock"; }
  std::string descriptors() const { return folder_ + "/descriptors.sock"; }
  static std::string Secret(const std::string& tenant) { return "secret-of-" + tenant; }
  std::string Hello(const std::string& tenant) const {
    return absl::StrCat("hello ", descriptors(), " ", tenant, " ", Secret(tenant));
  }

  // The tenants are alike and best effort. `policy` and `tenant` are further lines of those
  // sections.
  std::string Config(int pool_slabs, const std::string& policy = "",
                     const std::string& tenant = "") const {
    std::string yaml =
        absl::StrCat("node: test\nstate_dir: ", folder_, "/state\ncontrol_socket: ", control(),
                     "\ndescriptor_socket: ", descriptors(), "\npacker: worker/model/packer\n",
                     "pool:\n  bytes: ", 2 * pool_slabs, " MiB\n");
    if (!policy.empty()) absl::StrAppend(&yaml, "policy:\n", policy);
    absl::StrAppend(&yaml, "tenants:\n");
    for (const std::string& name : tenants_) {
      absl::StrAppend(&yaml, "  - name: ", name, "\n    secret_file: ", folder_, "/", name,
                      "\n    model: {path: ", model(),
                      ", max_sequence_tokens: 256}\n    floor: 0\n", tenant);
    }
    return yaml;
  }

 private:
  const std::vector<std::string> tenants_;
  std::string folder_;
  bool kept_ = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_TEST_NODE_H_
