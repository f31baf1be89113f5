// palctl against a broker and a router in this process.
#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/file.h"
#include "common/mutex.h"
#include "tools/palctl/commands.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
    v1::WorkerStatus* worker = response->add_workers();
    worker->set_model("smol");
    worker->set_address("127.0.0.1:9110");
    worker->set_healthy(true);
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

  std::vector<json> Lines() const {
    std::vector<json> lines;
    for (absl::string_view line : absl::StrSplit(out_, '\n', absl::SkipEmpty())) {
      lines.push_back(json::parse(line));
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

TEST_F(Palctl, StatusShowsTenantsSlabsAndWorkers) {
  ASSERT_EQ(Run({"status"}), kDone) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("generation 2, host back-end, pool 368 slabs of 2 MiB"),
                          HasSubstr("40 free, 326 granted, 2 revoking"), HasSubstr("128/162"),
                          HasSubstr("beta (pinned)"), HasSubstr("no worker"), HasSubstr("4/256"),
                          HasSubstr("127.0.0.1:9110")));
  EXPECT_THAT(out_, HasSubstr("router, tenant beta: the bearer token belongs to no tenant"));
}

TEST_F(Palctl, StatusSaysHowManyGpusASlabLiesOn) {
  ASSERT_EQ(Run({"status"}), kDone) << err_;
  EXPECT_THAT(out_, HasSubstr("slabs of 2 MiB (736 MiB), "));
  broker_.slab_pieces = 2;
  ASSERT_EQ(Run({"status"}), kDone) << err_;
  EXPECT_THAT(out_, HasSubstr("slabs of 2 MiB (736 MiB on each of 2 GPUs), "));
}

TEST_F(Palctl, StatusSaysWhoHasACopyOfItsImageOnAnotherGpu) {
  ASSERT_EQ(Run({"status"}), kDone) << err_;
  EXPECT_THAT(out_, ::testing::Not(HasSubstr("another GPU")));
  broker_.peer_slabs = 600;
  ASSERT_EQ(Run({"status"}), kDone) << err_;
  EXPECT_THAT(out_, HasSubstr("another GPU: 0 of 600 slabs free, alpha 300\n"));
}

TEST_F(Palctl, StatusAsJsonHasEverything) {
  ASSERT_EQ(Run({"status", "--json"}), kDone) << err_;
  const json status = json::parse(out_);
  EXPECT_EQ(status["pool_slabs"], 368);
  EXPECT_EQ(status["tenants"][0]["tenant"], "alpha");
  EXPECT_EQ(status["tenants"][0]["parameter_slabs"], 128);
  EXPECT_EQ(status["tenants"][0]["waiting_sequences"], 3);
  EXPECT_EQ(status["tenants"][1]["attached"], false);
  EXPECT_EQ(status["transfers"][0]["kind"], "revoke");
  EXPECT_EQ(status["transfers"][0]["role"], "parameter");
  EXPECT_EQ(status["transfers"][0]["reason"], "kv_demand");
  ASSERT_EQ(status["router"].size(), 1);
  EXPECT_EQ(status["router"][0]["workers"][0]["healthy"], true);
  EXPECT_EQ(status["router_errors"][0]["tenant"], "beta");
}

TEST_F(Palctl, StatusWithoutRouterStillShowsTheBroker) {
  router_server_->Shutdown();
  ASSERT_EQ(Run({"status", "--json"}), kDone) << err_;
  const json status = json::parse(out_);
  EXPECT_EQ(status["tenants"].size(), 2);
  EXPECT_TRUE(status["router"].empty());
  EXPECT_THAT(status["router_errors"][0]["error"], StartsWith("no router listens on 127.0.0.1:"));
}

TEST_F(Palctl, AMissingBrokerIsNamedWithTheWayToStartOne) {
  broker_server_->Shutdown();
  EXPECT_EQ(Run({"status"}), kUnreachable);
  EXPECT_THAT(err_, HasSubstr("no broker listens on " + folder_ +
                              "/broker.sock: start one with tools/quickstart --serve"));
}

TEST_F(Palctl, RemapExplainsDecisionsOfATenantOrSumsUp) {
  ASSERT_EQ(Run({"remap", "--explain", "--tenant", "alpha", "--last", "17"}), kDone) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("#17 "), HasSubstr("alpha needs 0 slabs (activation)")));
  ASSERT_EQ(Run({"remap"}), kDone) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("surplus kv"), HasSubstr("TIMES")));
  ASSERT_EQ(Run({"remap", "--explain", "--json"}), kDone) << err_;
  const json log = json::parse(out_);
  EXPECT_EQ(log["decisions"][0]["sequence"], 20);
  EXPECT_EQ(log["totals"][0]["rule"], "surplus_kv");
  EXPECT_EQ(Run({"remap", "--last", "0"}), kUsage);
}

TEST_F(Palctl, TopPrintsPlainSnapshotsWhereNobodyLooks) {
  ASSERT_EQ(Run({"top", "--count", "2", "--interval", "0.1"}), kDone) << err_;
  EXPECT_THAT(out_, AllOf(HasSubstr("128/162"), HasSubstr("revoke    kv_demand")));
  EXPECT_EQ(out_.find('\033'), std::string::npos);
}

TEST_F(Palctl, GenerateStreamsPlainText) {
  ASSERT_EQ(Run({"generate", "--tenant", "alpha", "--max-tokens", "8", "--temperature", "0",
                 "--seed", "7", "--stop", "END", "hello"}),
            kDone)
      << err_;
  EXPECT_EQ(out_, "echo: hello\n");
  EXPECT_THAT(err_, HasSubstr("ended by stop_token"));
  const v1::GenerateRequest request = router_.last_request();
  EXPECT_EQ(request.text(), "hello");
  EXPECT_EQ(request.sampling().max_tokens(), 8u);
  EXPECT_EQ(request.sampling().temperature(), 0);
  EXPECT_EQ(request.sampling().seed(), 7u);
  EXPECT_EQ(request.sampling().stop(0), "END");
  EXPECT_FALSE(request.sampling().has_top_p());
}

TEST_F(Palctl, HintsOfRequestsAndOfConversationsThatIdle) {
  ASSERT_EQ(Run({"generate", "--tenant", "alpha", "--conversation", "chat-1", "--expected-idle",
                 "8", "--then", "demote", "--tool-call", "<tool_call>", "hello"}),
            kDone)
      << err_;
  v1::GenerateRequest request = router_.last_request();
  EXPECT_EQ(request.conversation_id(), "chat-1");
  EXPECT_EQ(request.hints().expected_idle_seconds(), 8);
  EXPECT_TRUE(request.hints().then().has_demote());
  EXPECT_EQ(request.hints().tool_call_markers(0), "<tool_call>");
  EXPECT_EQ(Run({"generate", "--tenant", "alpha", "--expected-idle", "8", "--last-turn", "x"}),
            kUsage);
  ASSERT_EQ(Run({"hint", "retain", "--tenant", "alpha", "--conversation", "chat-1", "--seconds",
                 "60", "--half-life", "20", "--bytes", "1 MiB", "--priority", "5"}),
            kDone)
      << err_;
  EXPECT_EQ(out_, "7 blocks of conversation chat-1\n");
  const v1::CacheAction::Retain retain = router_.last_hint().action().retain();
  EXPECT_EQ(retain.seconds(), 60);
  EXPECT_EQ(retain.half_life_seconds(), 20);
  EXPECT_EQ(retain.budget_bytes(), 1u << 20);
  EXPECT_EQ(retain.priority(), 5u);
  ASSERT_EQ(Run({"hint", "prefetch", "--tenant", "alpha", "--conversation", "c"}), kDone) << err_;
  EXPECT_TRUE(router_.last_hint().action().has_prefetch());
  EXPECT_EQ(Run({"hint", "forget", "--tenant", "alpha", "--conversation", "c"}), kUsage);
  EXPECT_EQ(Run({"hint", "demote", "--tenant", "alpha"}), kUsage);
}

TEST_F(Palctl, GenerateAsJsonStreamsDeltasThenTheRecord) {
  ASSERT_EQ(Run({"generate", "--tenant", "alpha", "--chat", "--json", "--stream", "hi"}), kDone)
      << err_;
  const std::vector<json> lines = Lines();
  ASSERT_EQ(lines.size(), 3);
  EXPECT_EQ(lines[0], json({{"delta", "echo: "}}));
  EXPECT_EQ(lines[1], json({{"delta", "hi"}}));
  EXPECT_EQ(lines[2]["tenant"], "alpha");
  EXPECT_EQ(lines[2]["prompt"], "hi");
  EXPECT_EQ(lines[2]["text"], "echo: hi");
  EXPECT_EQ(lines[2]["token_ids"], json({1, 2}));
  EXPECT_EQ(lines[2]["finish_reason"], "stop_token");
  EXPECT_EQ(lines[2]["usage"]["prompt_tokens"], 5);
  EXPECT_GE(lines[2]["seconds"], lines[2]["ttft_seconds"]);
  EXPECT_EQ(router_.last_request().chat().messages(0).role(), "user");
}

TEST_F(Palctl, GenerateGoesOnWithAConversation) {
  const auto ask = [this](const std::string& earlier) {
    return Run({"generate", "--tenant", "alpha", "--chat", "--earlier",
                Write("earlier.json", earlier), "why?"});
  };
  ASSERT_EQ(ask(R"([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])"),
            kDone)
      << err_;
  const v1::Chat chat = router_.last_request().chat();
  ASSERT_EQ(chat.messages_size(), 3);
  EXPECT_EQ(chat.messages(0).content(), "hi");
  EXPECT_EQ(chat.messages(1).role(), "assistant");
  EXPECT_EQ(chat.messages(2).role(), "user");
  EXPECT_EQ(chat.messages(2).content(), "why?");
  for (const char* wrong :
       {"[", "{}", R"([{"role": "user"}])", R"([{"role": 1, "content": "a"}])"}) {
    EXPECT_EQ(ask(wrong), kUsage) << wrong;
    EXPECT_THAT(err_, HasSubstr("earlier.json: ")) << wrong;
  }
  EXPECT_EQ(Run({"generate", "--earlier", "a.json", "why?"}), kUsage) << "not a chat";
}

TEST_F(Palctl, GenerateAsksManyPromptsOfAFile) {
  std::string prompts;
  for (int i = 0; i < 50; ++i) absl::StrAppend(&prompts, "prompt ", i, "\n");
  const std::string file = Write("prompts.txt", prompts);
  ASSERT_EQ(Run({"generate", "--tenant", "alpha", "--json", "--concurrency", "8", "--prompts-file",
                 file}),
            kDone)
      << err_;
  std::set<std::string> texts;
  for (const json& line : Lines()) {
    texts.insert(line["text"]);
    EXPECT_EQ(line["text"], "echo: " + line["prompt"].get<std::string>());
  }
  EXPECT_EQ(texts.size(), 50);
}

TEST_F(Palctl, FailuresHaveTheirOwnExitStatus) {
  EXPECT_EQ(Run({"generate", "--tenant", "alpha", "fail"}), kUnreachable);
  EXPECT_THAT(err_, HasSubstr("no memory now"));
  EXPECT_EQ(Run({"generate", "--tenant", "beta", "x"}), kFailed);
  EXPECT_EQ(Run({"generate", "--tenant", "gamma", "x"}), kFailed);
  EXPECT_THAT(err_, HasSubstr("no token of tenant 'gamma' is known"));
  EXPECT_EQ(Run({"generate", "x"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("has tokens of: alpha, beta"));
  EXPECT_EQ(Run({"generate", "--tenant", "alpha", "\xFF"}), kUsage);
  EXPECT_EQ(Run({"generate", "--tenant", "alpha"}), kUsage);
  EXPECT_EQ(Run({"no-such-command"}), kUsage);
  EXPECT_EQ(Run({"--help"}), kDone);
  EXPECT_THAT(out_, HasSubstr("Exit status: 0 done"));
}

TEST_F(Palctl, NodeFilesAreCheckedWithLines) {
  Write("node.yaml", "broker: broker.sock\nrooter: 127.0.0.1:1\n");
  EXPECT_EQ(Run({"status"}), kUsage);
  EXPECT_THAT(err_, AllOf(HasSubstr("node.yaml:2"), HasSubstr("rooter")));
  Write("node.yaml", "router: 127.0.0.1:1\n");
  EXPECT_EQ(Run({"status"}), kFailed);
  EXPECT_THAT(err_, HasSubstr("--broker SOCKET"));
}

TEST_F(Palctl, TheNodeThatRunsIsFoundWithoutBeingNamed) {
  setenv("HOME", folder_.c_str(), /*replace=*/1);
  EXPECT_EQ(DefaultNodeFile(), "");
  std::filesystem::create_directories(folder_ + "/.config/palimpsest");
  std::filesystem::create_directories(folder_ + "/.cache/palimpsest/local");
  const std::string stopped = Write(".config/palimpsest/node.yaml", "broker: none.sock\n");
  EXPECT_EQ(DefaultNodeFile(), stopped);
  const std::string running = Write(".cache/palimpsest/local/node.yaml",
                                    absl::StrCat("broker: ", folder_, "/broker.sock\n"));
  EXPECT_EQ(DefaultNodeFile(), running);
}

TEST_F(Palctl, ARouterWithTlsIsAskedWithItsAuthority) {
  const std::string command = absl::StrCat(
      "cd '", folder_, "' && openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 ",
      "-nodes -days 1 -subj /CN=router.test -addext subjectAltName=DNS:router.test ",
      "-keyout key.pem -out cert.pem 2>/dev/null");
  ASSERT_EQ(std::system(command.c_str()), 0);
  const std::string certificate = folder_ + "/cert.pem";
  grpc::SslServerCredentialsOptions tls;
  tls.pem_key_cert_pairs.push_back(
      {*ReadFile(folder_ + "/key.pem", MiB(1)), *ReadFile(certificate, MiB(1))});
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::SslServerCredentials(tls), &port);
  FakeRouter router;
  builder.RegisterService(&router);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const std::string node =
      absl::StrCat("router: 127.0.0.1:", port, "\n", "tokens: {alpha: alpha.token}\n");
  Write("node.yaml", node);
  EXPECT_EQ(Run({"--tls-ca", certificate, "--server-name", "router.test", "tokenize", "A"}), kDone)
      << err_;
  EXPECT_EQ(out_, "65\n");
  EXPECT_EQ(Run({"--tls-ca", certificate, "tokenize", "A"}), kUnreachable);
  EXPECT_THAT(err_, HasSubstr("is --server-name the name in it?"));
  EXPECT_EQ(Run({"tokenize", "A"}), kUnreachable);
  EXPECT_THAT(err_, HasSubstr("give --tls-ca FILE"));
  EXPECT_EQ(Run({"--server-name", "router.test", "tokenize", "A"}), kUsage);
  Write("node.yaml", node + "tls_ca: cert.pem\nserver_name: router.test\n");
  EXPECT_EQ(Run({"tokenize", "A"}), kDone) << err_;
}

TEST_F(Palctl, TokenizePrintsIds) {
  ASSERT_EQ(Run({"tokenize", "--tenant", "alpha", "AB"}), kDone) << err_;
  EXPECT_EQ(out_, "65 66\n");
  ASSERT_EQ(Run({"tokenize", "--tenant", "alpha", "--json", "AB"}), kDone) << err_;
  EXPECT_EQ(json::parse(out_)["token_ids"], json({65, 66}));
}

TEST_F(Palctl, DrainTellsWhetherTheWorkersAreEmpty) {
  EXPECT_EQ(Run({"drain", "--tenant", "alpha"}), kDone) << err_;
  router_.remaining = 3;
  EXPECT_EQ(Run({"drain", "--tenant", "alpha", "--timeout", "1"}), kFailed);
  EXPECT_THAT(err_, HasSubstr("3 requests still run"));
}

TEST_F(Palctl, BenchRemapSaysWhatIsMissing) {
  EXPECT_EQ(Run({"bench", "remap"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("--config or --from"));
  EXPECT_EQ(Run({"bench", "remap", "--config", "/nowhere.yaml"}), kFailed);
  EXPECT_THAT(err_, HasSubstr("/nowhere.yaml"));
  const std::string other = ::testing::TempDir() + "/other.json";
  ASSERT_TRUE(WriteFileAtomically(other, "{\"points\": 1}").ok());
  EXPECT_EQ(Run({"bench", "remap", "--from", other}), kUsage);
  EXPECT_THAT(err_, HasSubstr("expected a result of palctl bench remap"));
}

TEST_F(Palctl, PlanSaysWhatFitsAndWhatMultiHeadSizingWould) {
  const std::string config = Write("config.json", R"({"model_type": "llama",
      "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
      "num_key_value_heads": 8, "max_position_embeddings": 8192})");
  std::vector<std::string> command = {"plan",     "--config", config,     "--memory", "T0=640GB",
                                      "--memory", "T1=80GiB", "--tokens", "131072"};
  ASSERT_EQ(Run(command), kDone) << err_;
  EXPECT_THAT(out_, HasSubstr("42949672960 B (40 GiB)"));
  EXPECT_THAT(out_, HasSubstr("sequences in T0"));
  EXPECT_THAT(out_, HasSubstr("configuration ends at 8192 tokens"));
  command.push_back("--json");
  ASSERT_EQ(Run(command), kDone) << err_;
  json plan = json::parse(out_);
  EXPECT_EQ(plan["bytes_per_token_layer"], 4096);
  EXPECT_EQ(plan["bytes_per_sequence"], int64_t{40} << 30);
  EXPECT_EQ(plan["mha_bytes_per_token_layer"], 32768);
  EXPECT_EQ(plan["max_sequences"], 14 + 2);
  EXPECT_EQ(plan["mha_max_sequences"], 1);
  EXPECT_EQ(plan["memory"][0]["max_sequences"], 14);
  EXPECT_EQ(plan["memory"][1]["name"], "T1");
  EXPECT_EQ(plan["memory"][1]["max_tokens"], 262144);
  command.insert(command.end(), {"--tp", "8", "--kv-dtype", "int8"});
  ASSERT_EQ(Run(command), kDone) << err_;
  EXPECT_EQ(json::parse(out_)["bytes_per_token_layer"], 2 * (128 + 4));
}

TEST_F(Palctl, PlanRefusesWhatItCannotSize) {
  const std::string config = Write("config.json", R"({"num_hidden_layers": 2})");
  const auto plan = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"plan", "--config", config, "--tokens", "100"});
    return Run(more);
  };
  EXPECT_EQ(plan({}), kUsage) << "no memory";
  EXPECT_EQ(plan({"--memory", "1GiB"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("num_attention_heads: expected"));
  EXPECT_EQ(plan({"--memory", "much"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("'much' is not a size"));
  EXPECT_EQ(plan({"--memory", "1GiB", "--memory", "2GiB"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("different names"));
  EXPECT_EQ(plan({"--memory", "1GiB", "--kv-dtype", "fp16"}), kUsage);
  EXPECT_THAT(err_, HasSubstr("expected one of bf16"));
  EXPECT_EQ(Run({"plan", "--config", "/nowhere.json", "--memory", "1GiB", "--tokens", "1"}),
            kFailed);
}

TEST_F(Palctl, ReplayRunsATraceUnderAPolicyBesideItsBounds) {
  const std::string trace =
      Write("trace.jsonl",
            R"({"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]}
{"timestamp": 5, "input_length": 512, "output_length": 1, "hash_ids": [4]}
{"timestamp": 9, "input_length": 1536, "output_length": 1, "hash_ids": [1, 2, 3]})");
  const std::vector<std::string> command = {"replay",   "--trace",  trace, "--format",
                                            "mooncake", "--blocks", "3"};
  ASSERT_EQ(Run(command), kDone) << err_;
  EXPECT_THAT(out_, HasSubstr("3 requests in 9ms, 7 blocks of 512 tokens, 4 of them distinct"));
  std::vector<std::string> more = command;
  more.insert(more.end(), {"--policy", "gdsf", "--leaves-first", "--json"});
  ASSERT_EQ(Run(more), kDone) << err_;
  const json result = json::parse(out_);
  EXPECT_EQ(result["policy"], "gdsf");
  EXPECT_DOUBLE_EQ(result["hit_rate_blocks"], 2.0 / 7);
  EXPECT_DOUBLE_EQ(result["hit_rate_tokens"], 2.0 / 7);
  EXPECT_DOUBLE_EQ(result["lru"], 0);
  EXPECT_DOUBLE_EQ(result["belady"], 3.0 / 7);
  EXPECT_DOUBLE_EQ(result["infinite"], 3.0 / 7);
  more = command;
  more.back() = "0";
  EXPECT_EQ(Run(more), kUsage);
  more = command;
  more.resize(5);
  EXPECT_EQ(Run(more), kUsage);
  EXPECT_THAT(err_, HasSubstr("--blocks or --tiers"));
  more.insert(more.end(),
              {"--policy", "predictive", "--hints", "idle", "--json", "--tiers",
               Write("tiers.yaml",
                     "recompute: {per_token: 1ms}\n"
                     "tiers: [{name: T0, blocks: 3}, {name: T1, blocks: 4, latency: 1ms, "
                     "bytes_per_second: 1e11}]\n")});
  ASSERT_EQ(Run(more), kDone) << err_;
  const json tiers = json::parse(out_);
  EXPECT_EQ(tiers["blocks"], 7);
  EXPECT_EQ(tiers["hints"], "idle");
  EXPECT_EQ(tiers["tiers"]["by_tier"][1]["name"], "T1");
  more.back() = "/nowhere.yaml";
  EXPECT_EQ(Run(more), kFailed);
  more = command;
  more[4] = "claude-code";
  EXPECT_EQ(Run(more), kFailed) << "when sessions start is not there";
  EXPECT_THAT(err_, HasSubstr("claude_code_starts.csv"));
}

TEST_F(Palctl, BenchControlMeasuresRoundTrips) {
  ASSERT_EQ(Run({"bench", "control", "--calls", "100", "--json"}), kDone) << err_;
  const json result = json::parse(out_);
  EXPECT_EQ(result["calls"], 100);
  EXPECT_GT(result["p50_seconds"], 0);
  EXPECT_GE(result["p99_seconds"], result["p50_seconds"]);
}

}  // namespace
}  // namespace palimpsest::palctl
