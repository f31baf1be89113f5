// palctl against a broker and a router in this process, for tests.
#ifndef PALIMPSEST_TOOLS_PALCTL_PALCTL_FIXTURE_H_
#define PALIMPSEST_TOOLS_PALCTL_PALCTL_FIXTURE_H_

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/mutex.h"
#include "tools/palctl/commands.h"

namespace palimpsest::palctl {

class FakeBroker : public v1::Broker::Service {
 public:
  std::atomic<uint32_t> slab_pieces = 1;
  std::atomic<uint32_t> peer_slabs = 0;

  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override {
    response->set_broker_generation(2);
    response->set_backend("host");
    response->set_slab_pieces(slab_pieces);
    response->set_slab_bytes(2 << 20);
    response->set_pool_slabs(368);
    response->set_free_slabs(40);
    response->set_granted_slabs(326);
    response->set_revoking_slabs(2);
    v1::TenantMemory* alpha = response->add_tenants();
    alpha->set_tenant("alpha");
    alpha->set_attached(true);
    alpha->set_pid(4242);
    alpha->set_parameter_slabs(128);
    alpha->set_image_slabs(162);
    response->set_peer_slabs(peer_slabs);
    alpha->set_peer_image_slabs(peer_slabs / 2);
    alpha->set_kv_slabs(7);
    alpha->set_grants_in_flight(5);
    alpha->set_revokes_in_flight(2);
    alpha->mutable_load()->set_active(true);
    alpha->mutable_load()->set_waiting_sequences(3);
    v1::TenantMemory* beta = response->add_tenants();
    beta->set_tenant("beta");
    beta->set_pinned(true);
    v1::Transfer* transfer = response->add_transfers();
    transfer->set_kind(v1::Transfer::KIND_REVOKE);
    transfer->set_role(v1::SLAB_ROLE_PARAMETER);
    transfer->set_tenant("alpha");
    transfer->set_slabs(34);
    transfer->set_seconds(0.25);
    transfer->set_reason("kv_demand");
    transfer->set_finished_at(4e9);
    return grpc::Status::OK;
  }

  grpc::Status GetRemapLog(grpc::ServerContext*, const v1::GetRemapLogRequest* request,
                           v1::GetRemapLogResponse* response) override {
    v1::RemapDecision* decision = response->add_decisions();
    decision->set_sequence(request->limit());
    decision->set_tenant(request->tenant());
    decision->set_reason("activation");
    v1::RemapTotal* total = response->add_totals();
    total->set_rule("surplus_kv");
    total->set_outcome("taken");
    return grpc::Status::OK;
  }
};

// Answers "echo: <prompt>" in two pieces to whoever brings alpha's token.
class FakeRouter : public v1::Router::Service {
 public:
  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateResponse>* writer) override {
    if (!IsAlpha(*context)) return Refused();
    {
      MutexLock lock(&mutex_);
      last_ = *request;
    }
    if (request->text() == "fail") return {grpc::StatusCode::UNAVAILABLE, "no memory now"};
    v1::GenerateResponse response;
    response.set_request_id("r1");
    response.set_text("echo: ");
    response.add_token_ids(1);
    writer->Write(response);
    v1::GenerateResponse last;
    last.set_text(request->has_chat() ? request->chat().messages(0).content() : request->text());
    last.add_token_ids(2);
    last.set_finish_reason(v1::FINISH_REASON_STOP_TOKEN);
    last.mutable_usage()->set_prompt_tokens(5);
    last.mutable_usage()->set_output_tokens(2);
    writer->Write(last);
    return grpc::Status::OK;
  }

  grpc::Status Tokenize(grpc::ServerContext* context, const v1::TokenizeRequest* request,
                        v1::TokenizeResponse* response) override {
    if (!IsAlpha(*context)) return Refused();
    for (const char c : request->text()) response->add_token_ids(c);
    return grpc::Status::OK;
  }

  grpc::Status GetTenantStatus(grpc::ServerContext* context, const v1::GetTenantStatusRequest*,
                               v1::GetTenantStatusResponse* response) override {
    if (!IsAlpha(*context)) return Refused();
    response->set_tenant("alpha");
    response->set_requests_in_flight(4);
    response->set_request_limit(256);
    response->set_requests_waiting(9);
    response->set_queue_limit(64);
    v1::WorkerStatus* worker = response->add_workers();
    worker->set_model("smol");
    worker->set_address("127.0.0.1:9110");
    worker->set_healthy(true);
    worker->set_requests_in_flight(6);
    worker->set_running_sequences(8);
    worker->set_waiting_sequences(11);
    return grpc::Status::OK;
  }

  grpc::Status HintConversation(grpc::ServerContext* context,
                                const v1::HintConversationRequest* request,
                                v1::HintConversationResponse* response) override {
    if (!IsAlpha(*context)) return Refused();
    MutexLock lock(&mutex_);
    hint_ = *request;
    response->set_blocks(7);
    return grpc::Status::OK;
  }

  grpc::Status DrainTenant(grpc::ServerContext* context, const v1::DrainTenantRequest*,
                           v1::DrainTenantResponse* response) override {
    if (!IsAlpha(*context)) return Refused();
    response->set_remaining_requests(remaining);
    return grpc::Status::OK;
  }

  v1::GenerateRequest last_request() const {
    MutexLock lock(&mutex_);
    return last_;
  }

  v1::HintConversationRequest last_hint() const {
    MutexLock lock(&mutex_);
    return hint_;
  }

  uint32_t remaining = 0;

 private:
  static bool IsAlpha(const grpc::ServerContext& context) {
    const auto found = context.client_metadata().find("authorization");
    return found != context.client_metadata().end() && found->second == "Bearer alpha-secret";
  }
  static grpc::Status Refused() {
    return {grpc::StatusCode::UNAUTHENTICATED, "the bearer token belongs to no tenant"};
  }

  mutable Mutex mutex_;
  v1::GenerateRequest last_ ABSL_GUARDED_BY(mutex_);
  v1::HintConversationRequest hint_ ABSL_GUARDED_BY(mutex_);
};

class Palctl : public ::testing::Test {
 protected:
  Palctl() {
    const char* root = std::getenv("TEST_TMPDIR");
    // Short: a Unix socket's path has 107 bytes at most.
    folder_ = "/tmp/palctl.XXXXXX";
    if (root != nullptr && std::string(root).size() < 60) {
      folder_ = absl::StrCat(root, "/p.XXXXXX");
    }
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    Write("alpha.token", "alpha-secret\n");
    Write("beta.token", "beta-secret\n");
    grpc::ServerBuilder broker_builder;
    broker_builder.AddListeningPort("unix:" + folder_ + "/broker.sock",
                                    grpc::InsecureServerCredentials());
    broker_builder.RegisterService(&broker_);
    broker_server_ = broker_builder.BuildAndStart();
    grpc::ServerBuilder router_builder;
    router_builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    router_builder.RegisterService(&router_);
    router_server_ = router_builder.BuildAndStart();
    node_ = Write("node.yaml", absl::StrCat("broker: broker.sock\nrouter: 127.0.0.1:", port_,
                                            "\ntokens: {alpha: alpha.token, beta: beta.token}\n"));
  }
  ~Palctl() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& content) const {
    std::string path = absl::StrCat(folder_, "/", name);
    std::ofstream(path) << content;
    chmod(path.c_str(), 0600);
    return path;
  }

  int Run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"palctl", "--node", node_});
    std::vector<const char*> argv;
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    std::ostringstream out;
    std::ostringstream err;
    const int code = RunPalctl(static_cast<int>(argv.size()), argv.data(), {out, err});
    out_ = out.str();
    err_ = err.str();
    return code;
  }

  std::vector<nlohmann::json> Lines() const {
    std::vector<nlohmann::json> lines;
    for (absl::string_view line : absl::StrSplit(out_, '\n', absl::SkipEmpty())) {
      lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  }

  std::string folder_;
  std::string node_;
  int port_ = 0;
  FakeBroker broker_;
  FakeRouter router_;
  std::unique_ptr<grpc::Server> broker_server_;
  std::unique_ptr<grpc::Server> router_server_;
  std::string out_;
  std::string err_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_PALCTL_FIXTURE_H_
