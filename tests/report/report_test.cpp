#include "hasten/report/report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/svg.h"
#include "page.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace report_test {

using detail::run_report::decimated;
using detail::run_report::read_run;
using detail::run_report::RunRecords;
using detail::run_report::Series;
using nlohmann::json;

class ReportTest : public testing::Test {
 protected:
  /// A run with these records and files.
  RunFolder run(const std::string& name, const std::string& records, const json& state = {},
                const json& arguments = {}) const {
    const auto path = folder_ / name;
    std::filesystem::create_directories(path);
    write_file_atomically(path / "metrics.jsonl", records);
    if (!state.is_null()) {
      write_file_atomically(path / "hasten_state.json", state.dump());
    }
    if (!arguments.is_null()) {
      write_file_atomically(path / "training_args.json", arguments.dump());
    }
    return {.path = path, .name = name};
  }

  testing_support::TemporaryFolder folder_{};
};

std::string train_line(int64_t step, double loss) {
  return json{{"type", "train"}, {"step", step}, {"epoch", 0.1}, {"loss", loss}}.dump() + "\n";
}

std::string eval_line(int64_t step, double loss, const json& more = json::object()) {
  json record{{"type", "eval"}, {"step", step}, {"epoch", 1.0}, {"eval_loss", loss}};
  record.update(more);
  return record.dump() + "\n";
}

/// The points that the script of a page shows.
json island(const std::string& page) {
  const std::string open = "<script type=\"application/json\" id=\"data\">";
  const size_t at = page.find(open) + open.size();
  return json::parse(page.substr(at, page.find("</script>", at) - at));
}

bool has(const std::string& page, const std::string& text) {
  return page.find(text) != std::string::npos;
}

size_t count(const std::string& page, const std::string& text) {
  size_t times = 0;
  for (size_t at = 0; (at = page.find(text, at)) != std::string::npos; ++at) {
    ++times;
  }
  return times;
}

} // namespace report_test

using namespace report_test;

TEST(Markup, EscapesTagsQuotesAndKeepsLetters) {
  EXPECT_EQ(escape_markup("<b a=\"1\" c='2'>&amp;"),
            "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;amp;");
  EXPECT_EQ(escape_markup("</script>"), "&lt;/script&gt;");
  EXPECT_EQ(escape_markup("größe — 漢字 😀 שלום\t\n"), "größe — 漢字 😀 שלום\t\n");
}

TEST(Markup, ControlBytesAndInvalidUtf8BecomeReplacements) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(clean_text(std::string("a\0b\x1b\x7f", 5)), "a" + r + "b" + r + r);
  EXPECT_EQ(clean_text("\xC2\x85"), r); // a C1 control
  // No UTF-8, an overlong "/", a surrogate, above U+10FFFF, torn.
  for (const char* bytes : {"\xFF", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xE6\xBC"}) {
    const std::string clean = clean_text(std::string("a") + bytes + "b");
    EXPECT_TRUE(clean.starts_with("a" + r) && clean.ends_with("b")) << clean;
    EXPECT_EQ(json(clean).dump(), "\"" + clean + "\""); // dump() throws for what is not UTF-8
  }
}

TEST(Markup, MarksOfDirectionBecomeVisible) {
  EXPECT_EQ(clean_text("a\xE2\x80\xAE"
                       "b\xE2\x81\xA6"),
            "a<RLO>b<LRI>");
  EXPECT_EQ(escape_markup("\xE2\x80\x8F"), "&lt;RLM&gt;");
}

TEST(Ticks, AreRoundAndInsideTheRange) {
  EXPECT_EQ(round_ticks(0, 100, 4), (std::vector<double>{0, 25, 50, 75, 100}));
  EXPECT_EQ(round_ticks(3, 17, 3), (std::vector<double>{5, 10, 15}));
  EXPECT_TRUE(round_ticks(1, 1, 4).empty());
  EXPECT_TRUE(round_ticks(0, std::numeric_limits<double>::infinity(), 4).empty());
  EXPECT_LE(round_ticks(1e17, 1e17 + 16, 4).size(), 6U); // steps below a double's precision
}

TEST(Svg, NumbersHaveOneDecimalPlaceAndTextsAreEscaped) {
  EXPECT_EQ(svg_number(2), "2");
  EXPECT_EQ(svg_number(-0.04), "0");
  EXPECT_EQ(svg_number(12.345), "12.3");
  SvgWriter svg(10, 20);
  svg.text(1, 2, "<&>");
  EXPECT_TRUE(has(svg.finish(), ">&lt;&amp;&gt;</text>"));
}

TEST(Decimation, KeepsFirstLastAndEveryPeak) {
  Series series;
  for (int i = 0; i < 100'000; ++i) {
    series.steps.push_back(i);
    series.values.push_back(i % 7);
  }
  series.values[12'345] = 1000;
  series.values[77'777] = -1000;
  const Series kept = decimated(series);
  EXPECT_LE(kept.values.size(), 2000U);
  EXPECT_EQ(kept.steps.front(), 0);
  EXPECT_EQ(kept.steps.back(), 99'999);
  EXPECT_EQ(std::count(kept.steps.begin(), kept.steps.end(), 12'345), 1);
  EXPECT_EQ(std::count(kept.steps.begin(), kept.steps.end(), 77'777), 1);
  EXPECT_TRUE(std::is_sorted(kept.steps.begin(), kept.steps.end()));
}

TEST(Decimation, KeepsAllOfAShortSeries) {
  for (const size_t size : {0U, 1U, 2U, 5U, 2000U}) {
    Series series;
    for (size_t i = 0; i < size; ++i) {
      series.steps.push_back(static_cast<double>(i));
      series.values.push_back(0);
    }
    EXPECT_EQ(decimated(series).values.size(), size);
  }
}

TEST_F(ReportTest, ShowsTheRecordedValues) {
  const std::string page =
      report_page({run("out", train_line(10, 0.75) + train_line(20, 0.5) + eval_line(20, 0.625))});
  const json chart = island(page)[0];
  EXPECT_EQ(chart["t"], "Loss");
  EXPECT_TRUE(has(page, "data-chart=\"0\"><figcaption>Loss"));
  EXPECT_EQ(chart["s"][0]["x"], json({10, 20}));
  EXPECT_EQ(chart["s"][0]["y"], json({0.75, 0.5}));
  EXPECT_EQ(chart["s"][1]["n"], "evaluation");
  EXPECT_EQ(chart["s"][1]["y"], json({0.625}));
  EXPECT_TRUE(has(page, "not finished"));
}

TEST_F(ReportTest, PageMakesNoRequest) {
  const std::string page = report_page({run("out", train_line(1, 1))});
  EXPECT_TRUE(has(page, "default-src 'none'"));
  for (const char* text : {"src=\"", "href=", "@import", "url(", "fetch(", "https://"}) {
    EXPECT_FALSE(has(page, text)) << text;
  }
}

TEST_F(ReportTest, AcceptsNoRecordAndOneRecord) {
  EXPECT_TRUE(has(report_page({run("none", "")}), "There are no values yet."));
  const std::string page = report_page({run("one", train_line(0, 0.5))});
  EXPECT_EQ(island(page)[0]["s"][0]["y"], json({0.5}));
  EXPECT_FALSE(has(page, "nan"));
}

TEST_F(ReportTest, NotesATornLastLineAndLinesThatAreNoRecords) {
  const std::string page = report_page(
      {run("out", train_line(1, 1) + "[1]\nnonsense\n" + train_line(2, 2) + "{\"type\":\"tra")});
  EXPECT_TRUE(has(page, "The last line of metrics.jsonl is incomplete"));
  EXPECT_TRUE(has(page, "2 lines of metrics.jsonl cannot be read"));
  EXPECT_EQ(island(page)[0]["s"][0]["x"], json({1, 2}));
}

TEST_F(ReportTest, NamesANewerFormatAndShowsUnknownKeys) {
  const std::string page = report_page(
      {run("out",
           R"({"type":"train","step":1,"loss":1,"new_value":3,"odd":{"a":[1,{"b":2}]},"text":"x"})"
           "\n"
           R"({"type":"unheard of","step":"one","loss":[]})"
           "\n",
           {{"format", 2}, {"hasten_version", "9.1"}})});
  EXPECT_TRUE(has(page, "A newer hasten (9.1) wrote hasten_state.json: format 2."));
  EXPECT_TRUE(has(page, "new value"));
}

TEST_F(ReportTest, AcceptsValuesOfWrongTypes) {
  for (const char* value : {"null", "true", "\"x\"", "[]", "{}", "1e300", "-1", "[[1]]"}) {
    std::string record = R"({"type":"eval")";
    for (const char* key : {"step", "epoch", "eval_loss", "confusion_matrix", "per_class",
                            "most_wrong", "grad_norm", "step_seconds"}) {
      record += std::string(",\"") + key + "\":" + value;
    }
    json state;
    for (const char* key : {"format", "hasten_version", "world_size", "train_rows"}) {
      state[key] = json::parse(value);
    }
    for (const char* type : {"eval", "train", "resume", "end", "start", "epoch"}) {
      const std::string line = R"({"type":")" + std::string(type) + record.substr(13) + "}\n";
      EXPECT_NO_THROW(report_page({run("out", line + train_line(2, 1) + line, state, state)}))
          << line;
    }
  }
}

TEST_F(ReportTest, ShowsWhereTimeAndMemoryWentAndTheStartOnce) {
  const std::string page =
      report_page({run("out",
                       R"({"type":"start","command":"hasten train --seed 7","cpu":"a CPU"})"
                       "\n"
                       R"({"type":"train","step":1,"loss":1,"samples_per_second":8,)"
                       R"("step_seconds":{"compute":0.5,"recompute":0.25}})"
                       "\n"
                       R"({"type":"epoch","step":1,"samples_per_second":4,)"
                       R"("peak_tensor_bytes_by_rank":[1024,2048]})"
                       "\n",
                       nullptr, {{"model", "bert-tiny"}})});
  std::map<std::string, json> curves;
  for (const json& chart : island(page)) {
    for (const json& curve : chart.at("s")) {
      curves[chart.at("t").get<std::string>() + ": " + curve.at("n").get<std::string>()] =
          curve.at("y");
    }
  }
  EXPECT_EQ(curves, (std::map<std::string, json>{{"Loss: training", {1}},
                                                 {"Samples per second: by record", {8}},
                                                 {"Samples per second: by epoch", {4}},
                                                 {"Time of a step: compute", {0.5}},
                                                 {"Time of a step: recompute", {0.25}},
                                                 {"Tensor memory by rank: rank 0", {1024}},
                                                 {"Tensor memory by rank: rank 1", {2048}}}));
  EXPECT_TRUE(has(page, "hasten train --seed 7"));
  EXPECT_TRUE(has(page, "a CPU"));
  EXPECT_EQ(count(page, ">command<"), 1);
}

TEST_F(ReportTest, CountsValuesThatAreNotFinite) {
  const std::string page =
      report_page({run("out", train_line(1, 1) + R"({"type":"train","step":2,"loss":null})"
                                                 "\n")});
  EXPECT_TRUE(has(page, "loss is not a finite number in 1 records, first at step 2."));
}

TEST_F(ReportTest, AResumeDropsTheStepsThatWereGivenUp) {
  const RunRecords records = read_run(
      run("out", train_line(1, 1) + train_line(2, 2) + train_line(3, 3) +
                     R"({"type":"resume","step":1,"from":"out/checkpoint-1","world_size":2})"
                     "\n" +
                     train_line(2, 4)));
  EXPECT_EQ(records.find("train/loss")->values, (std::vector<double>{1, 4}));
}

TEST_F(ReportTest, TextsOfSamplesCannotLeaveTheirPlace) {
  const std::string evil = "</script><script>alert(1)</script>\xE2\x80\xAE\"'><img src=x>";
  const json results{
      {"confusion_matrix", {{"labels", {evil, "b"}}, {"counts", {{3, 1}, {0, 4}}}}},
      {"per_class", {{evil, {{"precision", 1}, {"recall", 0.75}, {"f1", 0.8}, {"support", 4}}}}},
      {"most_wrong", {{{"text", evil}, {"label", evil}, {"predicted", "b"}, {"loss", 3.5}}}},
      {evil, 0.5}};
  RunFolder folder = run(evil.substr(9, 8), train_line(1, 1) + eval_line(1, 1, results), {},
                         {{"model", evil}, {evil, evil}});
  folder.name = evil;
  const std::string page = report_page({folder});
  EXPECT_EQ(count(page, "<script"), 2U);
  EXPECT_EQ(count(page, "</script>"), 2U);
  EXPECT_FALSE(has(page, "<img"));
  EXPECT_FALSE(has(page, "\xE2\x80\xAE"));
  EXPECT_TRUE(has(page, "Confusion matrix") && has(page, "75 %") && has(page, "alert(1)"));
  EXPECT_NO_THROW(island(page));
}

TEST_F(ReportTest, LeavesTextsOutOnRequest) {
  const json wrong{
      {"most_wrong", {{{"text", "my secret"}, {"label", "a"}, {"predicted", "b"}, {"loss", 3.5}}}}};
  const RunFolder folder = run("out", eval_line(1, 1, wrong));
  EXPECT_TRUE(has(report_page({folder}), "my secret"));
  const std::string page = report_page({folder}, {.texts = false});
  EXPECT_FALSE(has(page, "my secret"));
  EXPECT_TRUE(has(page, "most wrong about") && has(page, "3.5"));
}

TEST_F(ReportTest, ReadsResultsFromTheirOwnFile) {
  const RunFolder folder = run("out", train_line(1, 1));
  write_file_atomically(
      folder.path / "eval_results.json",
      json{{"confusion_matrix", {{"labels", {"a", "b"}}, {"counts", {{3, 1}, {0, 4}}}}}}.dump());
  EXPECT_TRUE(has(report_page({folder}), "Confusion matrix"));
}

TEST_F(ReportTest, LaysRunsSideBySide) {
  const auto a = run("a", train_line(1, 1) + eval_line(2, 0.5), {},
                     {{"learning_rate", 0.1}, {"model", "bert-tiny"}});
  const auto b = run("b", train_line(1, 2) + train_line(2, 1.5), {},
                     {{"learning_rate", 0.2}, {"model", "bert-tiny"}});
  const std::string page = report_page({a, b});
  const std::string differing = page.substr(page.find("Arguments that differ"));
  const std::string rows = differing.substr(0, differing.find("</table>"));
  EXPECT_TRUE(has(rows, "learning_rate") && has(rows, "0.1") && has(rows, "0.2"));
  EXPECT_FALSE(has(rows, "model"));
  const json loss = island(page)[0];
  EXPECT_EQ(loss["t"], "Loss: training");
  EXPECT_EQ(loss["s"].size(), 2U);
  EXPECT_EQ(loss["s"][1]["n"], "b");
  EXPECT_NE(loss["s"][0]["c"], loss["s"][1]["c"]);
}

TEST_F(ReportTest, RefusesAFolderThatIsNoRun) {
  std::filesystem::create_directories(folder_ / "empty");
  for (const char* name : {"empty", "missing"}) {
    try {
      report_page({{.path = folder_ / name}});
      FAIL();
    } catch (const InputError& error) {
      EXPECT_TRUE(has(error.what(), "[report::write_report] ") && has(error.what(), name) &&
                  has(error.what(), "metrics.jsonl"))
          << error.what();
    }
  }
  EXPECT_THROW(report_page({}), InputError);
}

TEST_F(ReportTest, ALongRunIsQuickAndSmall) {
  std::string records;
  for (int64_t step = 1; step <= 100'000; ++step) {
    records += json{{"type", "train"},
                    {"step", step},
                    {"epoch", static_cast<double>(step) / 1000},
                    {"loss", 1 + 1.0 / static_cast<double>(step % 97 + 1)},
                    {"grad_norm", 0.1 * static_cast<double>(step % 13)},
                    {"learning_rate", 1e-4 * (1 - static_cast<double>(step) / 1e5)}}
                   .dump() +
               "\n";
  }
  const RunFolder folder = run("long", records);
  const auto start = std::chrono::steady_clock::now();
  write_report({folder}, folder_ / "report.html");
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 10); // about 0.5 s; a busy machine takes longer
  const std::string page = read_file(folder_ / "report.html");
  EXPECT_LT(page.size(), 3'000'000U);
  EXPECT_TRUE(has(page, "at most 2,000 points"));
  for (const auto& chart : island(page)) {
    EXPECT_LE(chart["s"][0]["x"].size(), 2000U);
    EXPECT_EQ(chart["s"][0]["x"].back(), 100'000);
  }
  RecordProperty("seconds", std::to_string(seconds.count()));
}

} // namespace hasten
