#include "hasten/data/text_classification.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <set>

#include "hasten/base/error.h"
#include "support/temporary_folder.h"

namespace hasten {

using Names = std::vector<std::string>;

struct TextFiles {
  testing_support::TemporaryFolder folder{};
  std::filesystem::path write(const std::string& name, const std::string& text) {
    std::ofstream(folder / name) << text;
    return folder / name;
  }
};

std::string input_error(const std::function<void()>& action) {
  try {
    action();
    return "(no error)";
  } catch (const InputError& error) {
    return error.what();
  }
}

void expect_parts(const std::string& text, const Names& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nin: " << text;
  }
}

// `counts[i]` rows of label "c<i>", all texts different.
std::string rows_of_labels(const std::vector<int>& counts) {
  std::string text = "text,label\n";
  int row = 0;
  for (size_t label = 0; label < counts.size(); ++label) {
    for (int i = 0; i < counts[label]; ++i) {
      text += "review " + std::to_string(row++) + ",c" + std::to_string(label) + "\n";
    }
  }
  return text;
}

TEST(TextTable, SkipsAndCountsEmptyAndFilteredRows) {
  TextFiles files;
  const auto path =
      files.write("r.csv",
                  "text,label,source\na,pos,x\n,pos,x\n  \xC2\xA0,neg,x\nb,,x\nc, neg ,x\n"
                  "d,pos,y\n");
  const auto table = read_text_table(path, {.filters = {"source=x"}});
  EXPECT_EQ(table.texts, (Names{"a", "c"}));
  EXPECT_EQ(table.labels, (Names{"pos", "neg"}));
  EXPECT_EQ(table.lines, (std::vector<int64_t>{2, 6}));
  EXPECT_EQ(table.rows_read, 6);
  EXPECT_EQ(table.empty_text, 2);
  EXPECT_EQ(table.empty_label, 1);
  EXPECT_EQ(table.filtered_out, 1);
  EXPECT_EQ(table.position(1), path.string() + ":6");
}

TEST(TextTable, MaxRowsTakesTheFirstThatPass) {
  TextFiles files;
  const auto path = files.write("r.tsv", "a\t1\tx\nb\t0\ty\n\t1\tx\nc\t1\tx\nd\t0\tx\n");
  const auto table = read_text_table(path, {.text_column = "0",
                                            .label_column = "1",
                                            .has_header = false,
                                            .filters = {"2=x"},
                                            .max_rows = 2});
  EXPECT_EQ(table.texts, (Names{"a", "c"}));
}

TEST(TextTable, PredictionKeepsEveryRow) {
  TextFiles files;
  const auto path = files.write("r.csv", "n,text\n1,a\n2,\n3,c\n");
  const auto table = read_text_table(path, {.label_column = "", .keep_empty_text = true});
  EXPECT_EQ(table.texts, (Names{"a", "", "c"}));
}

TEST(TextTable, WhatCannotBeReadIsNamed) {
  TextFiles files;
  const auto path = files.write("r.csv", "text,label,source\na,pos,imdb\n");
  const auto error = [&](TextTableOptions options) {
    return input_error([&] { read_text_table(path, options); });
  };
  expect_parts(error({.text_column = "review"}),
               {"text_column=review", "text (\"a\"), label (\"pos\")"});
  expect_parts(error({.filters = {"source"}}), {"filter=source", "column=value"});
  expect_parts(error({.filters = {"sauce=x"}}), {"filter column=sauce"});
  expect_parts(error({.filters = {"source=x"}}),
               {"no row of " + path.string(), "left out by filters 1"});
}

TEST(Labels, IntegersAreSortedAsNumbersAndNamesByBytes) {
  EXPECT_EQ(distinct_labels({"10", "9", "-1", "10"}), (Names{"-1", "9", "10"}));
  EXPECT_EQ(distinct_labels({"pos", "neg", "10"}), (Names{"10", "neg", "pos"}));
}

TEST(Labels, PlaceholderNamesOfAModelTakeNumbers) {
  TextTable table;
  table.texts = {"a", "b"};
  table.labels = {"1", "0"};
  EXPECT_EQ(label_numbers(table, {"LABEL_0", "LABEL_1"}, "the model"),
            (std::vector<int64_t>{1, 0}));
}

TEST(TextClassification, NamesOfTheModelWinAndForeignLabelsAreListed) {
  TextFiles files;
  const auto path = files.write("r.csv", "text,label\na,neg\nb,pos\nc,meh\nd,odd\n");
  TextClassificationOptions options{.train_file = path,
                                    .label_names = {"pos", "odd", "neg", "meh"}};
  EXPECT_EQ(load_text_classification(options).train.labels, (std::vector<int64_t>{2, 0, 3, 1}));
  options.label_names = {"pos", "neg"};
  expect_parts(input_error([&] { load_text_classification(options); }),
               {path.string() + ":4: label=meh is unknown to the model",
                "unknown altogether: meh, odd", "one of: pos, neg"});
}

TEST(TextClassification, NamesOfTheModelGiveWayToTheDatasWhereThatIsAskedFor) {
  TextFiles files;
  const auto path = files.write("r.csv", "text,label\na,neg\nb,pos\nc,neg\n");
  TextClassificationOptions options{
      .train_file = path, .label_names = {"pos", "odd", "neg"}, .replace_label_names = true};
  EXPECT_EQ(load_text_classification(options).label_names, options.label_names);
  options.label_names = {"pos", "odd"};
  const auto data = load_text_classification(options);
  EXPECT_EQ(data.label_names, (Names{"neg", "pos"}));
  EXPECT_EQ(data.train.labels, (std::vector<int64_t>{0, 1, 0}));
  options.eval_file = files.write("e.csv", "text,label\nd,odd\n");
  expect_parts(input_error([&] { load_text_classification(options); }),
               {"label=odd is unknown to the training data"});
}

TEST(TextClassification, AnEvaluationLabelThatTrainingLacksIsNamedWithItsLine) {
  TextFiles files;
  const auto train = files.write("t.csv", "text,label\na,0\nb,1\n");
  const auto eval = files.write("e.csv", "text,label\n\"c\n\",1\nd,2\n");
  expect_parts(
      input_error([&] { load_text_classification({.train_file = train, .eval_file = eval}); }),
      {eval.string() + ":4: label=2 is unknown to the training data", "one of: 0, 1"});
}

TEST(TextClassification, SplitIsSeededAndStratified) {
  TextFiles files;
  const auto path = files.write("r.csv", rows_of_labels({70, 25, 4, 1}));
  const auto load = [&](uint64_t seed) {
    return load_text_classification({.train_file = path, .eval_split = 0.2, .seed = seed});
  };
  const auto data = load(1);
  EXPECT_EQ(data.eval.size(), 20);
  EXPECT_EQ(data.train.size(), 80);
  EXPECT_EQ(data.report.eval_counts, (std::vector<int64_t>{14, 5, 1, 0}));
  EXPECT_EQ(data.report.train_counts, (std::vector<int64_t>{56, 20, 3, 1}));
  std::set<std::string> texts(data.train.texts.begin(), data.train.texts.end());
  texts.insert(data.eval.texts.begin(), data.eval.texts.end());
  EXPECT_EQ(texts.size(), 100u);
  EXPECT_EQ(load(1).eval.texts, data.eval.texts);
  EXPECT_NE(load(2).eval.texts, data.eval.texts);
}

TEST(TextClassification, EverySideHasRowsOfEveryLabelForAnyShare) {
  TextFiles files;
  const auto path = files.write("r.csv", rows_of_labels({30, 2, 2}));
  for (const double share : {0.001, 0.5, 0.999}) {
    const auto data = load_text_classification({.train_file = path, .eval_split = share});
    for (int label = 0; label < 3; ++label) {
      EXPECT_GE(data.report.train_counts[label], 1);
      EXPECT_GE(data.report.eval_counts[label], 1);
    }
  }
}

TEST(TextClassification, TextsOfTrainingAreKeptOutOfEvaluation) {
  TextFiles files;
  std::string text = "text,label\n";
  for (int row = 0; row < 200; ++row) {
    text += "review " + std::to_string(row % 120) + "," + std::to_string(row % 2) + "\n";
  }
  const auto path = files.write("r.csv", text);
  const auto split = load_text_classification({.train_file = path, .eval_split = 0.3});
  EXPECT_GT(split.report.duplicates, 10);
  EXPECT_EQ(split.eval.size(), 60 - split.report.duplicates);
  EXPECT_EQ(split.train.size() + split.eval.size(), 200);
  for (const auto& seen : split.eval.texts) {
    EXPECT_EQ(std::count(split.train.texts.begin(), split.train.texts.end(), seen), 0);
  }
  const auto eval = files.write("e.csv", "text,label\nreview 7,1\nnew,0\n");
  const auto two = load_text_classification({.train_file = path, .eval_file = eval});
  EXPECT_EQ(two.eval.texts, Names{"new"});
  EXPECT_EQ(two.eval.lines, std::vector<int64_t>{3});
  EXPECT_EQ(two.report.duplicates, 1);
  EXPECT_EQ(two.train.size(), 200);
}

TEST(TextClassification, OneClassIsAWarningAndTheReportSaysWhatWasLeftOut) {
  TextFiles files;
  const auto path = files.write("r.csv", "text,label\na,pos\n,pos\nb,pos\n");
  const auto data = load_text_classification({.train_file = path});
  ASSERT_EQ(data.report.warnings.size(), 1u);
  expect_parts(data.report.warnings[0], {"one class only, label=pos"});
  EXPECT_EQ(data.report.lines(data.label_names),
            (Names{"training data: 2 rows: pos 2 (100.0 %)",
                   "of 3 rows read, left out: 1 with empty text"}));
}

TEST(TextClassification, ContradictoryOptionsAreNamed) {
  TextFiles files;
  const auto path = files.write("r.csv", "text,label\na,x\na,y\na,x\n");
  const auto error = [](TextClassificationOptions options) {
    return input_error([&] { load_text_classification(options); });
  };
  for (const double share : {-0.1, 1.0, 2.0}) {
    expect_parts(error({.train_file = path, .eval_split = share}), {"eval_split="});
  }
  expect_parts(error({.train_file = path, .eval_file = path, .eval_split = 0.1}),
               {"eval_file=", "together with eval_split"});
  expect_parts(error({.train_file = path, .table = {.label_column = ""}}), {"label_column"});
  expect_parts(error({.train_file = path, .eval_split = 0.5}), {"no row is left for evaluation"});
}

} // namespace hasten
