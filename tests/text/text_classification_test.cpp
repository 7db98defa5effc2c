#include "hasten/text/text_classification.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <functional>
#include <set>

#include "hasten/base/error.h"
#include "support/temporary_folder.h"

namespace hasten {

using Names = std::vector<std::string>;

struct WrittenFiles {
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

// `counts[i]` samples with label "c<i>"; all texts differ.
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

struct TableRows {
  Names texts{};
  Names labels{};
  std::vector<int64_t> lines{};
  TextRowCounts counts{};
};

TableRows read_rows(const std::filesystem::path& path, const TextTableOptions& options) {
  TextRowReader reader(TextFile::open(path), options);
  TableRows rows;
  while (reader.next()) {
    rows.texts.emplace_back(reader.text());
    rows.labels.emplace_back(reader.label());
    rows.lines.push_back(reader.line());
  }
  reader.require_rows();
  rows.counts = reader.counts();
  return rows;
}

// The selection, with the chosen texts.
struct Selected : TextSelection {
  struct Rows {
    Names texts{};
    std::vector<int32_t> labels{};
    std::vector<int64_t> lines{};
  };
  Rows train_rows{}, eval_rows{};
};

Selected select(const std::filesystem::path& train, const TextClassificationOptions& options = {},
                const std::filesystem::path& eval = {}) {
  Selected selected{select_text_rows(TextFile::open(train),
                                     eval.empty() ? nullptr : TextFile::open(eval), options)};
  for (const SelectedRows& file : selected.files) {
    const TableRows read = read_rows(file.files.at(0)->path(), file.table);
    EXPECT_EQ(read.texts.size(), file.sides.size());
    for (size_t row = 0; row < file.sides.size(); ++row) {
      if (file.sides[row] != SelectedRows::Side::left_out) {
        auto& side =
            file.sides[row] == SelectedRows::Side::train ? selected.train_rows : selected.eval_rows;
        side.texts.push_back(read.texts[row]);
        side.labels.push_back(file.labels[row]);
        side.lines.push_back(read.lines[row]);
      }
    }
  }
  return selected;
}

TEST(TextTable, SkipsAndCountsEmptyAndFilteredRows) {
  WrittenFiles files;
  const auto path =
      files.write("r.csv",
                  "text,label,source\na,pos,x\n,pos,x\n  \xC2\xA0,neg,x\nb,,x\nc, neg ,x\n"
                  "d,pos,y\n");
  const auto table = read_rows(path, {.filters = {"source=x"}});
  EXPECT_EQ(table.texts, (Names{"a", "c"}));
  EXPECT_EQ(table.labels, (Names{"pos", "neg"}));
  EXPECT_EQ(table.lines, (std::vector<int64_t>{2, 6}));
  EXPECT_EQ(table.counts.rows_read, 6);
  EXPECT_EQ(table.counts.empty_text, 2);
  EXPECT_EQ(table.counts.empty_label, 1);
  EXPECT_EQ(table.counts.filtered_out, 1);
}

TEST(TextTable, MaxRowsTakesTheFirstThatPass) {
  WrittenFiles files;
  const auto path = files.write("r.tsv", "a\t1\tx\nb\t0\ty\n\t1\tx\nc\t1\tx\nd\t0\tx\n");
  const auto table = read_rows(path, {.text_column = "0",
                                      .label_column = "1",
                                      .has_header = false,
                                      .filters = {"2=x"},
                                      .max_rows = 2});
  EXPECT_EQ(table.texts, (Names{"a", "c"}));
}

TEST(TextTable, PredictionKeepsEveryRow) {
  WrittenFiles files;
  const auto path = files.write("r.csv", "n,text\n1,a\n2,\n3,c\n");
  const auto table = read_rows(path, {.label_column = "", .keep_empty_text = true});
  EXPECT_EQ(table.texts, (Names{"a", "", "c"}));
}

TEST(TextTable, WhatCannotBeReadIsNamed) {
  WrittenFiles files;
  const auto path = files.write("r.csv", "text,label,source\na,pos,imdb\n");
  const auto error = [&](TextTableOptions options) {
    return input_error([&] { read_rows(path, options); });
  };
  expect_parts(error({.text_column = "review"}),
               {"text_column=review", "text (\"a\"), label (\"pos\")"});
  expect_parts(error({.filters = {"source"}}), {"filter=source", "column=value"});
  expect_parts(error({.filters = {"sauce=x"}}), {"filter column=sauce"});
  expect_parts(error({.filters = {"source=x"}}),
               {"no sample of " + path.string(), "left out by filters 1"});
}

TEST(Labels, IntegersAreSortedAsNumbersAndNamesByBytes) {
  EXPECT_EQ(distinct_labels({"10", "9", "-1", "10"}), (Names{"-1", "9", "10"}));
  EXPECT_EQ(distinct_labels({"pos", "neg", "10"}), (Names{"10", "neg", "pos"}));
}

// pandas writes the whole numbers of a column with a gap as 1.0.
TEST(Labels, OneAndOnePointZeroAreOneLabel) {
  EXPECT_EQ(distinct_labels({"1.0", "0", "1", "0.0"}), (Names{"0", "1"}));
  EXPECT_EQ(distinct_labels({"1.0", "1.5", "2.0"}), (Names{"1.0", "1.5", "2.0"}));
  EXPECT_EQ(label_numbers({"1.0", "1", "0.0", "2"}, {"0", "1"}),
            (std::vector<int64_t>{1, 1, 0, -1}));
  EXPECT_EQ(label_numbers({"1", "1.0"}, {"0.0", "1.0"}), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(label_numbers({"v1.0", "1.00"}, {"1", "v1"}), (std::vector<int64_t>{-1, -1}));
}

TEST(Labels, PlaceholderNamesOfAModelTakeNumbers) {
  EXPECT_EQ(label_numbers({"1", "0", "2"}, {"LABEL_0", "LABEL_1"}),
            (std::vector<int64_t>{1, 0, -1}));
}

TEST(TextClassification, NamesOfTheModelWinAndForeignLabelsAreListed) {
  WrittenFiles files;
  const auto path = files.write("r.csv", "text,label\na,neg\nb,pos\nc,meh\nd,odd\n");
  TextClassificationOptions options{.label_names = {"pos", "odd", "neg", "meh"}};
  EXPECT_EQ(select(path, options).train_rows.labels, (std::vector<int32_t>{2, 0, 3, 1}));
  options.label_names = {"pos", "neg"};
  expect_parts(input_error([&] { select(path, options); }),
               {path.string() + ":4: label=meh is unknown to the model",
                "all unknown labels: meh, odd", "one of: pos, neg"});
}

TEST(TextClassification, NamesOfTheModelGiveWayToTheDatasWhereThatIsAskedFor) {
  WrittenFiles files;
  const auto path = files.write("r.csv", "text,label\na,neg\nb,pos\nc,neg\n");
  TextClassificationOptions options{.label_names = {"pos", "odd", "neg"},
                                    .replace_label_names = true};
  EXPECT_EQ(select(path, options).label_names, options.label_names);
  options.label_names = {"pos", "odd"};
  const auto data = select(path, options);
  EXPECT_EQ(data.label_names, (Names{"neg", "pos"}));
  EXPECT_EQ(data.train_rows.labels, (std::vector<int32_t>{0, 1, 0}));
  const auto eval = files.write("e.csv", "text,label\nd,odd\n");
  expect_parts(input_error([&] { select(path, options, eval); }),
               {"label=odd is unknown to the training data"});
}

TEST(TextClassification, AnEvaluationLabelThatTrainingLacksIsNamedWithItsLine) {
  WrittenFiles files;
  const auto train = files.write("t.csv", "text,label\na,0\nb,1\n");
  const auto eval = files.write("e.csv", "text,label\n\"c\n\",1\nd,2\n");
  expect_parts(input_error([&] { select(train, {}, eval); }),
               {eval.string() + ":4: label=2 is unknown to the training data", "one of: 0, 1"});
}

TEST(TextClassification, SplitIsSeededAndStratified) {
  WrittenFiles files;
  const auto path = files.write("r.csv", rows_of_labels({70, 25, 4, 1}));
  const auto load = [&](uint64_t seed) { return select(path, {.eval_split = 0.2, .seed = seed}); };
  const auto data = load(1);
  EXPECT_EQ(std::ssize(data.eval_rows.texts), 20);
  EXPECT_EQ(std::ssize(data.train_rows.texts), 80);
  EXPECT_EQ(data.report.eval.counts, (std::vector<int64_t>{14, 5, 1, 0}));
  EXPECT_EQ(data.report.train.counts, (std::vector<int64_t>{56, 20, 3, 1}));
  std::set<std::string> texts(data.train_rows.texts.begin(), data.train_rows.texts.end());
  texts.insert(data.eval_rows.texts.begin(), data.eval_rows.texts.end());
  EXPECT_EQ(texts.size(), 100u);
  EXPECT_EQ(load(1).eval_rows.texts, data.eval_rows.texts);
  EXPECT_NE(load(2).eval_rows.texts, data.eval_rows.texts);
}

TEST(TextClassification, EverySideHasRowsOfEveryLabelForAnyShare) {
  WrittenFiles files;
  const auto path = files.write("r.csv", rows_of_labels({30, 2, 2}));
  for (const double share : {0.001, 0.5, 0.999}) {
    const auto data = select(path, {.eval_split = share});
    for (int label = 0; label < 3; ++label) {
      EXPECT_GE(data.report.train.counts[label], 1);
      EXPECT_GE(data.report.eval.counts[label], 1);
    }
  }
}

TEST(TextClassification, TextsOfTrainingAreKeptOutOfEvaluation) {
  WrittenFiles files;
  std::string text = "text,label\n";
  for (int row = 0; row < 200; ++row) {
    text += "review " + std::to_string(row % 120) + "," + std::to_string(row % 2) + "\n";
  }
  const auto path = files.write("r.csv", text);
  const auto split = select(path, {.eval_split = 0.3});
  EXPECT_GT(split.report.duplicates, 10);
  EXPECT_EQ(std::ssize(split.eval_rows.texts), 60 - split.report.duplicates);
  EXPECT_EQ(std::ssize(split.train_rows.texts) + std::ssize(split.eval_rows.texts), 200);
  for (const auto& seen : split.eval_rows.texts) {
    EXPECT_EQ(std::count(split.train_rows.texts.begin(), split.train_rows.texts.end(), seen), 0);
  }
  const auto eval = files.write("e.csv", "text,label\nreview 7,1\nnew,0\n");
  const auto two = select(path, {}, eval);
  EXPECT_EQ(two.eval_rows.texts, Names{"new"});
  EXPECT_EQ(two.eval_rows.lines, std::vector<int64_t>{3});
  EXPECT_EQ(two.report.duplicates, 1);
  EXPECT_EQ(std::ssize(two.train_rows.texts), 200);
}

TEST(TextClassification, OneClassIsAWarningAndTheReportSaysWhatWasLeftOut) {
  WrittenFiles files;
  const auto path = files.write("r.csv", "text,label\na,pos\n,pos\nb,pos\n");
  const auto data = select(path);
  ASSERT_EQ(data.report.warnings.size(), 1u);
  expect_parts(data.report.warnings[0], {"only one class, label=pos"});
  EXPECT_EQ(data.report.lines(data.label_names),
            (Names{"training data: 2 samples: pos 2 (100.0 %)",
                   "of 3 records read, left out: 1 with empty text"}));
}

TEST(TextClassification, ContradictoryOptionsAreNamed) {
  WrittenFiles files;
  const auto path = files.write("r.csv", "text,label\na,x\na,y\na,x\n");
  const auto error = [&](TextClassificationOptions options,
                         const std::filesystem::path& eval = {}) {
    return input_error([&] { select(path, options, eval); });
  };
  for (const double share : {-0.1, 1.0, 2.0}) {
    expect_parts(error({.eval_split = share}), {"eval_split="});
  }
  expect_parts(error({.eval_split = 0.1}, path), {"eval_file=", "together with eval_split"});
  expect_parts(error({.table = {.label_column = ""}}), {"label_column"});
  expect_parts(error({.table = {.problem_type = ProblemType::multi_label}}),
               {"problem_type=multi_label_classification", "label_columns or label_separator"});
  expect_parts(error({.eval_split = 0.5}), {"no sample is left for evaluation"});
}

TEST(TextClassification, NumbersAreDrawnAlikeAndTheirRangeIsSaid) {
  WrittenFiles files;
  std::string text = "text,stars\n,1\nblank,\n";
  for (int row = 0; row < 20; ++row) {
    text += "film " + std::to_string(row) + "," + std::to_string(row % 2 == 0 ? 4.5 : -1.5) + "\n";
  }
  const auto path = files.write("r.csv", text);
  TextClassificationOptions options{
      .eval_split = 0.25,
      .table = {.label_column = "stars", .problem_type = ProblemType::regression}};
  const auto data = select(path, options);
  EXPECT_EQ(data.label_names, Names{"stars"});
  EXPECT_EQ(data.report.eval.rows, 5);
  EXPECT_EQ(data.report.train.rows, 15);
  EXPECT_EQ(data.report.train.sum + data.report.eval.sum, 30);
  EXPECT_EQ(std::bit_cast<float>(data.files[0].labels[1]), -1.5f);
  const auto lines = data.report.lines(data.label_names);
  expect_parts(lines.at(0), {"training data: 15 samples, stars from -1.5 to 4.5, mean "});
  EXPECT_EQ(lines.back(), "of 22 records read, left out: 1 with empty text, 1 with empty label");
  for (const std::string bad : {"two", "nan", "inf", "1e99", "3 stars"}) {
    expect_parts(
        input_error([&] { select(files.write("b.csv", "text,stars\na,1\nb," + bad), options); }),
        {"b.csv:3: stars=" + bad, "a finite number"});
  }
}

TEST(TextClassification, SetsOfLabelsComeFromColumnsOrOneField) {
  WrittenFiles files;
  const auto columns = files.write("c.csv", "text,fun,long\na,1,true\nb,0,1.0\nc,False,0\nd,0,1\n");
  const auto field = files.write("f.csv", "text,tags\na,long | fun|long\nb,long\nc,\nd,long\n");
  TextClassificationOptions by_column{
      .table = {.problem_type = ProblemType::multi_label, .label_columns = {"fun", "long"}}};
  TextClassificationOptions by_field{.table = {.label_column = "tags",
                                               .problem_type = ProblemType::multi_label,
                                               .label_separator = "|"}};
  for (const auto& data : {select(columns, by_column), select(field, by_field)}) {
    EXPECT_EQ(data.label_names, (Names{"fun", "long"}));
    EXPECT_EQ(data.label_sets, (std::vector<std::vector<int32_t>>{{0, 1}, {1}, {}}));
    EXPECT_EQ(data.train_rows.labels, (std::vector<int32_t>{0, 1, 2, 1}));
    EXPECT_EQ(data.report.train.counts, (std::vector<int64_t>{1, 3}));
    EXPECT_EQ(data.report.lines(data.label_names),
              Names{"training data: 4 samples: fun 1 (25.0 %), long 3 (75.0 %)"});
  }
  const auto eval = files.write("e.csv", "text,tags\na,fun\ne,fun|odd\n");
  expect_parts(input_error([&] { select(field, by_field, eval); }),
               {"e.csv:3: label=odd is unknown to the training data", "one of: fun, long"});
  expect_parts(input_error([&] { select(field, by_column); }),
               {"label_column=fun is not a column"});
  const auto bad = files.write("b.csv", "text,fun,long\na,1,maybe\n");
  expect_parts(input_error([&] { select(bad, by_column); }), {"b.csv:2: long=maybe", "0 or 1"});
  expect_parts(input_error([&] { select(files.write("n.csv", "text,tags\na,\n"), by_field); }),
               {"no sample of", "has a label in column=tags"});
}

} // namespace hasten
