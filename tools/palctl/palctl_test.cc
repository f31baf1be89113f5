// What palctl shows of a node, and what it asks of it.
#include <gmock/gmock.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/palctl_fixture.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

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
  EXPECT_EQ(status["tenants"][0]["grants_in_flight"], 5);
  EXPECT_EQ(status["tenants"][0]["revokes_in_flight"], 2);
  EXPECT_EQ(status["tenants"][1]["attached"], false);
  EXPECT_EQ(status["transfers"][0]["kind"], "revoke");
  EXPECT_EQ(status["transfers"][0]["role"], "parameter");
  EXPECT_EQ(status["transfers"][0]["reason"], "kv_demand");
  ASSERT_EQ(status["router"].size(), 1);
  EXPECT_EQ(status["router"][0]["tenant"], "alpha");
  EXPECT_EQ(status["router"][0]["requests_in_flight"], 4);
  EXPECT_EQ(status["router"][0]["request_limit"], 256);
  EXPECT_EQ(status["router"][0]["requests_waiting"], 9);
  EXPECT_EQ(status["router"][0]["queue_limit"], 64);
  EXPECT_EQ(status["router"][0]["workers"][0]["healthy"], true);
  EXPECT_EQ(status["router"][0]["workers"][0]["requests_in_flight"], 6);
  EXPECT_EQ(status["router"][0]["workers"][0]["running_sequences"], 8);
  EXPECT_EQ(status["router"][0]["workers"][0]["waiting_sequences"], 11);
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

TEST_F(Palctl, BenchControlMeasuresRoundTrips) {
  ASSERT_EQ(Run({"bench", "control", "--calls", "100", "--json"}), kDone) << err_;
  const json result = json::parse(out_);
  EXPECT_EQ(result["calls"], 100);
  EXPECT_GT(result["p50_seconds"], 0);
  EXPECT_GE(result["p99_seconds"], result["p50_seconds"]);
}

}  // namespace
}  // namespace palimpsest::palctl
