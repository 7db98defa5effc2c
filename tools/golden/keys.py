"""Writes src/tables/known_keys.inc: what hasten makes of each key of the JSON files that the reference
reads in a folder, one row a key.

  keys.py            write the table
  keys.py --verify   change each neutral key in the reference alone: its output must stay (minutes)
  keys.py --opens    print the files that the reference opens in a folder, but for those that Rust opens

The names come from transformers, tokenizers and PEFT as installed: the script fails if a field of
theirs has no row. What hasten makes of a key stands here by hand:
  used     hasten reads it and gives the reference's result
  neutral  it changes nothing of what hasten computes: weights, logits, loss, ids
  refused  hasten has no such feature: any value but those listed, and null, is an error
A row of a model_type comes before one of "*", and "model_type:Task" before both.

Run: python tools/golden/keys.py   (needs torch, transformers, peft)
"""

import argparse
import dataclasses
import inspect
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "src" / "tables" / "known_keys.inc"
ENCODERS = ["bert", "ernie", "distilbert", "roberta", "xlm-roberta", "camembert", "modernbert"]
GEMMAS = ["gemma2", "gemma3_text"]
LLAMAS = ["llama", "mistral", "ministral", "ministral3", "phi3", "gemma", *GEMMAS, "qwen2", "qwen3", "smollm3"]
DECODERS = ["gpt2", *LLAMAS]
CONFIG, GENERATION, ADAPTER = "config.json", "generation_config.json", "adapter_config.json"
TOKENIZER_CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
TOKENIZER, INDEX = "tokenizer.json", "model.safetensors.index.json"
GENERATE_ARGUMENTS = ["logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "streamer",
                      "negative_prompt_ids", "negative_prompt_attention_mask"]
rows = {}  # (file, of, key): (use, values that change nothing)


def put(use, file, of, keys, values=()):
    for each in [of] if isinstance(of, str) else of:
        for key in keys.split():
            rows[file, each, key] = (use, list(values))


def used(*row):
    put("used", *row)


def neutral(*row):
    put("neutral", *row)


def refused(file, of, **keys):
    """key=[the values with which it changes nothing, the default first]"""
    for key, values in keys.items():
        put("refused", file, of, key, values)


def generation_rows():
    used(GENERATION, "*", "do_sample temperature top_k top_p repetition_penalty eos_token_id max_new_tokens max_length stop_strings")
    # generate() has its own cache, and answers without the prompt's padding.
    neutral(GENERATION, "*", "use_cache cache_config max_cache_len pad_token_id bos_token_id prefill_chunk_size low_memory disable_compile")
    # Of beams, of which there is one, and of encoder-decoder models.
    neutral(GENERATION, "*", "early_stopping length_penalty diversity_penalty num_beam_groups decoder_start_token_id")
    # Of what generate() returns besides the tokens, and of how it computes the same tokens.
    neutral(GENERATION, "*", "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate renormalize_logits "
            "remove_invalid_values num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_early_exit "
            "assistant_lookbehind target_lookbehind assistant_ensemble_weight prompt_lookup_num_tokens max_matching_ngram_size "
            "speculation_type continuous_batching_config transformers_version _from_model_config _commit_hash")
    refused(GENERATION, "*", num_beams=[1], num_return_sequences=[1], min_length=[0], min_new_tokens=[0], no_repeat_ngram_size=[0],
            encoder_repetition_penalty=[1], encoder_no_repeat_ngram_size=[0], penalty_alpha=[0], guidance_scale=[1], max_time=[], bad_words_ids=[], suppress_tokens=[[]], begin_suppress_tokens=[[]],
            sequence_bias=[], forced_bos_token_id=[], forced_eos_token_id=[], exponential_decay_length_penalty=[], watermarking_config=[],
            constraints=[], force_words_ids=[], dola_layers=[], token_healing=[False], use_mtp=[False], is_assistant=[False],
            compile_config=[], cache_implementation=["dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid"])
    # With do_sample=true only.
    neutral(GENERATION, "*", "min_p top_h typical_p epsilon_cutoff eta_cutoff")
    refused(GENERATION, "do_sample", min_p=[0], top_h=[], typical_p=[1], epsilon_cutoff=[0], eta_cutoff=[0])
    # Arguments of generate(), with which transformers refuses the file.
    refused(GENERATION, "*", **dict.fromkeys(GENERATE_ARGUMENTS, []))


def config_rows():
    # Without a generation_config.json generate() reads these here, by that file's rows.
    for file, _, key in list(rows):
        if file == GENERATION and key not in GENERATE_ARGUMENTS:
            neutral(CONFIG, "*", key)
    used(CONFIG, "*", "model_type architectures vocab_size id2label num_labels problem_type initializer_range pad_token_id eos_token_id "
         "tokenizer_class")
    # Weights are computed with in fp32 or by autocast, whatever they were saved in.
    neutral(CONFIG, "*", "dtype torch_dtype")
    # Of the model's outputs, of how it is run, of its training, of where it comes from.
    neutral(CONFIG, "*", "label2id transformers_version _name_or_path name_or_path return_dict use_return_dict output_hidden_states "
            "output_attentions output_past use_cache torchscript use_bfloat16 tf_legacy_loss gradient_checkpointing chunk_size_feed_forward "
            "attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset experts_implementation "
            "_experts_implementation_internal _flash_attn_2_enabled finetuning_task task_specific_params prefix bos_token_id sep_token_id "
            "cls_token_id unk_token_id mask_token_id decoder_start_token_id cross_attention_hidden_size tie_encoder_decoder pruned_heads "
            "auto_map _commit_hash unsloth_version unsloth_fixed transformers.js_config language license model_max_length "
            "tie_last_hidden_states is_composition summary_type summary_use_proj summary_activation summary_last_dropout")
    refused(CONFIG, "*", is_encoder_decoder=[False], quantization_config=[], compression_config=[], per_layer_config=[],
            position_embedding_type=["absolute"])

    berts = ["bert", "ernie", "roberta", "xlm-roberta", "camembert"]
    used(CONFIG, "ernie", "use_task_id task_type_vocab_size")
    used(CONFIG, berts, "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act hidden_dropout_prob "
         "attention_probs_dropout_prob max_position_embeddings type_vocab_size layer_norm_eps classifier_dropout")
    refused(CONFIG, berts, is_decoder=[False], add_cross_attention=[False])
    neutral(CONFIG, "bert", "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type "
            "gradient_checkpointing vocab_size_or_config_json_file layer_norm_type")
    used(CONFIG, "distilbert", "dim n_layers n_heads hidden_dim activation dropout attention_dropout seq_classif_dropout "
         "max_position_embeddings sinusoidal_pos_embds hidden_size num_hidden_layers num_attention_heads")
    neutral(CONFIG, "distilbert", "qa_dropout tie_weights_ is_decoder add_cross_attention")
    used(CONFIG, "modernbert", "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_activation max_position_embeddings "
         "norm_eps norm_bias attention_bias attention_dropout layer_types rope_parameters local_attention embedding_dropout mlp_bias "
         "mlp_dropout decoder_bias classifier_pooling classifier_dropout classifier_bias classifier_activation global_rope_theta "
         "local_rope_theta global_attn_every_n_layers")
    neutral(CONFIG, "modernbert", "initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index "
            "reference_compile repad_logits_with_grad layer_norm_eps hidden_act rope_theta is_decoder add_cross_attention")
    neutral(CONFIG, ["modernbert:MaskedLM", "modernbert:TokenClassification"], "classifier_pooling")
    neutral(CONFIG, ["modernbert:SequenceClassification", "modernbert:TokenClassification"], "decoder_bias")
    refused(CONFIG, "modernbert", sliding_window=[], rope_scaling=[{}])
    for family in ENCODERS:
        neutral(CONFIG, family, "tie_word_embeddings")
        refused(CONFIG, family + ":MaskedLM", tie_word_embeddings=[True])

    used(CONFIG, DECODERS, "tie_word_embeddings")
    neutral(CONFIG, [each + task for each in DECODERS for task in (":SequenceClassification", ":TokenClassification")],
            "tie_word_embeddings")
    neutral(CONFIG, DECODERS, "classifier_dropout")
    used(CONFIG, [each + ":TokenClassification" for each in DECODERS if each != "gemma3_text"], "classifier_dropout")
    neutral(CONFIG, DECODERS, "is_decoder")
    used(CONFIG, "gpt2", "n_embd n_layer n_head n_positions n_inner activation_function resid_pdrop embd_pdrop attn_pdrop "
         "layer_norm_epsilon hidden_size num_hidden_layers num_attention_heads max_position_embeddings")
    neutral(CONFIG, "gpt2", "n_ctx summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout "
            "reorder_and_upcast_attn predict_special_tokens n_special afn model_parallel")
    refused(CONFIG, "gpt2", scale_attn_weights=[True], scale_attn_by_inverse_layer_idx=[False], add_cross_attention=[False])
    used(CONFIG, LLAMAS, "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size "
         "max_position_embeddings rms_norm_eps attention_dropout head_dim rope_parameters rope_scaling rope_theta")
    refused(CONFIG, LLAMAS, partial_rotary_factor=[1], original_max_position_embeddings=[])
    neutral(CONFIG, LLAMAS, "add_cross_attention layer_norm_eps")
    neutral(CONFIG, "*", "pretraining_tp rope_interleaved is_llama_config max_sequence_length")
    used(CONFIG, [each for each in LLAMAS if each not in GEMMAS], "hidden_act")
    used(CONFIG, GEMMAS, "hidden_activation query_pre_attn_scalar attn_logit_softcapping layer_types sliding_window")
    used(CONFIG, [each + ":CausalLM" for each in GEMMAS], "final_logit_softcapping")
    neutral(CONFIG, GEMMAS, "final_logit_softcapping hidden_act mlp_bias cache_implementation use_sliding_window default_theta")
    refused(CONFIG, ["gemma", *GEMMAS], use_bidirectional_attention=[False])
    neutral(CONFIG, "gemma", "hidden_activation mlp_bias")
    refused(CONFIG, "gemma2", sliding_window_pattern=[2])
    used(CONFIG, "gemma3_text", "sliding_window_pattern rope_local_base_freq")
    neutral(CONFIG, "gemma3_text", "_sliding_window_pattern")
    used(CONFIG, "phi3", "original_max_position_embeddings partial_rotary_factor resid_pdrop sliding_window")
    neutral(CONFIG, "phi3", "embd_pdrop attention_bias mlp_bias layer_types use_sliding_window max_window_layers")
    used(CONFIG, ["ministral", "ministral3"], "sliding_window")
    used(CONFIG, "ministral", "layer_types")
    neutral(CONFIG, ["ministral", "ministral3"], "attention_bias mlp_bias use_sliding_window max_window_layers")
    neutral(CONFIG, "ministral3", "layer_types llama_4_scaling_beta")
    used(CONFIG, ["llama", "qwen3", "smollm3", "gemma", *GEMMAS], "attention_bias")
    used(CONFIG, ["llama", "smollm3"], "mlp_bias")
    neutral(CONFIG, "llama", "sliding_window use_sliding_window max_window_layers")
    neutral(CONFIG, "qwen2", "attention_bias")
    used(CONFIG, "mistral", "sliding_window")
    neutral(CONFIG, "mistral", "attention_bias mlp_bias use_sliding_window max_window_layers layer_types")
    used(CONFIG, "smollm3", "layer_types use_sliding_window sliding_window no_rope_layers no_rope_layer_interval")
    neutral(CONFIG, "smollm3", "max_window_layers")
    neutral(CONFIG, ["qwen2", "qwen3"], "mlp_bias use_mrope seq_length")
    used(CONFIG, ["qwen2", "qwen3"], "layer_types use_sliding_window sliding_window max_window_layers")

    used(CONFIG, "rope_parameters", "rope_type type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings "
         "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor partial_rotary_factor "
         "llama_4_scaling_beta")
    neutral(CONFIG, "rope_parameters", "finetuned max_position_embeddings")
    used(CONFIG, ["rope_parameters:modernbert", "rope_parameters:gemma3_text"], "full_attention sliding_attention")


def adapter_rows():
    used(ADAPTER, "*", "peft_type base_model_name_or_path r lora_alpha lora_dropout use_rslora fan_in_fan_out target_modules "
         "modules_to_save layers_to_transform exclude_modules rank_pattern alpha_pattern bias use_dora")
    refused(ADAPTER, "*", layers_pattern=[[]], task_type=["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION"])
    # Of where it comes from, of how it began, and of Megatron.
    neutral(ADAPTER, "*", "auto_mapping revision inference_mode peft_version megatron_core qalora_group_size loftq_config eva_config "
            "corda_config lora_ga_config runtime_config enable_lora merge_weights")
    refused(ADAPTER, "*", use_qalora=[False], lora_bias=[False],
            init_lora_weights=[True, False, "gaussian", "orthogonal"], layer_replication=[[]], target_parameters=[[]],
            trainable_token_indices=[], alora_invocation_tokens=[], megatron_config=[], arrow_config=[], use_bdlora=[], kasa_config=[],
            velora_config=[], monteclora_config=[], ensure_weight_tying=[False])


NAMED = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token"
CLASSES = ["BertTokenizer", "RobertaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "XLMRobertaTokenizer"]


def tokenizer_config_rows():
    # "*_token": any other key with this end and a text is a special token, too.
    used(TOKENIZER_CONFIG, "*", NAMED + " *_token tokenizer_class added_tokens_decoder additional_special_tokens extra_special_tokens "
         "model_specific_special_tokens model_max_length max_len padding_side truncation_side clean_up_tokenization_spaces "
         "add_bos_token add_eos_token")
    refused(TOKENIZER_CONFIG, "*", split_special_tokens=[False], init_inputs=[[]], fast_tokenizer_files=[[]], fix_mistral_regex=[False],
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=[False], post_processor=[], tokenizer_object=[],
            tokenizer_padding=[], tokenizer_truncation=[])
    # Of chats, of arguments that encode() gets, of where the files are.
    neutral(TOKENIZER_CONFIG, "*", "chat_template response_template response_schema chat_control_tokens processor_class auto_map name_or_path "
            "special_tokens_map_file tokenizer_file vocab_file merges_file added_tokens_file from_slow is_local local_files_only backend "
            "verbose errors use_fast sp_model_kwargs model_input_names max_length stride truncation truncation_strategy padding "
            "pad_to_multiple_of pad_token_type_id pad_token_id bos_token_id eos_token_id tokenizer_type transformers_version files_loaded "
            "do_basic_tokenize never_split wordpieces_prefix clean_text use_default_system_prompt vocab merges spaces_between_special_tokens "
            "special_tokens")
    # What builds the parts of tokenizer.json anew, by class.
    neutral(TOKENIZER_CONFIG, "*", "do_lower_case strip_accents tokenize_chinese_chars add_prefix_space trim_offsets legacy")
    used(TOKENIZER_CONFIG, "BertTokenizer", "do_lower_case strip_accents tokenize_chinese_chars")
    used(TOKENIZER_CONFIG, [each for each in CLASSES if each != "BertTokenizer"], "add_prefix_space")
    used(TOKENIZER_CONFIG, "RobertaTokenizer", "trim_offsets")
    used(TOKENIZER_CONFIG, "LlamaTokenizer", "legacy")
    used(SPECIAL, "*", NAMED + " *_token additional_special_tokens extra_special_tokens")
    used(ADDED, "*", "*")  # each key is a token


def tokenizer_rows():
    """The fields of the Rust structures."""
    used(TOKENIZER, "*", "added_tokens normalizer pre_tokenizer post_processor decoder model")
    neutral(TOKENIZER, "*", "version truncation padding")
    used(TOKENIZER, "added_token", "id content single_word lstrip rstrip normalized special")
    for part, keys in {
            "normalizer:Sequence": "normalizers", "normalizer:Strip": "strip_left strip_right", "normalizer:Replace": "pattern content",
            "normalizer:BertNormalizer": "clean_text handle_chinese_chars strip_accents lowercase", "normalizer:Prepend": "prepend",
            "normalizer:Precompiled": "precompiled_charsmap", "normalizer:NFC": "", "normalizer:NFD": "", "normalizer:NFKC": "",
            "normalizer:NFKD": "", "normalizer:Lowercase": "", "normalizer:StripAccents": "",
            "pre_tokenizer:Sequence": "pretokenizers", "pre_tokenizer:BertPreTokenizer": "", "pre_tokenizer:Whitespace": "",
            "pre_tokenizer:WhitespaceSplit": "", "pre_tokenizer:ByteLevel": "add_prefix_space use_regex",
            "pre_tokenizer:Punctuation": "behavior", "pre_tokenizer:Digits": "individual_digits",
            "pre_tokenizer:Metaspace": "replacement prepend_scheme split add_prefix_space", "pre_tokenizer:Split": "pattern behavior invert",
            "post_processor:Sequence": "processors", "post_processor:ByteLevel": "add_prefix_space trim_offsets",
            "post_processor:TemplateProcessing": "single pair special_tokens", "post_processor:BertProcessing": "sep cls",
            "post_processor:RobertaProcessing": "sep cls trim_offsets add_prefix_space",
            "decoder:Sequence": "decoders", "decoder:WordPiece": "prefix cleanup", "decoder:ByteLevel": "",
            "decoder:Metaspace": "replacement prepend_scheme add_prefix_space", "decoder:ByteFallback": "", "decoder:Fuse": "",
            "decoder:Replace": "pattern content", "decoder:Strip": "content start stop", "decoder:BPEDecoder": "suffix",
            "model:BPE": "unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback ignore_merges vocab merges",
            "model:WordPiece": "unk_token continuing_subword_prefix max_input_chars_per_word vocab",
            "model:Unigram": "unk_id vocab byte_fallback"}.items():
        used(TOKENIZER, part, "type " + keys)
    refused(TOKENIZER, "model:BPE", dropout=[0])
    neutral(TOKENIZER, "pre_tokenizer:ByteLevel", "trim_offsets")
    neutral(TOKENIZER, "pre_tokenizer:Metaspace", "str_rep")
    neutral(TOKENIZER, "post_processor:ByteLevel", "use_regex")
    neutral(TOKENIZER, "decoder:ByteLevel", "add_prefix_space trim_offsets use_regex")
    neutral(TOKENIZER, "decoder:Metaspace", "split str_rep")
    used(INDEX, "*", "weight_map")
    neutral(INDEX, "*", "metadata")


def fill():
    generation_rows()
    config_rows()
    adapter_rows()
    tokenizer_config_rows()
    tokenizer_rows()


def find(file, of, key):
    """The row of a key, or None. of: "type:Task", a type, a class or a part."""
    for each in (of, of.split(":")[0], "*") if file != TOKENIZER else (of,):
        if (file, each, key) in rows:
            return rows[file, each, key]
    return None


def missing_rows():
    """Fields of the reference that have no row."""
    import peft
    import transformers

    missing = []

    def need(file, of, names):
        missing.extend((file, of, name) for name in names if find(file, of, name) is None)

    for family in ENCODERS + DECODERS:
        config = transformers.AutoConfig.for_model(family)
        need(CONFIG, family, [field.name for field in dataclasses.fields(config)])
        need(CONFIG, family, config.to_dict())
        need(CONFIG, family, [name for pair in config.attribute_map.items() for name in pair])
        need(CONFIG, family, transformers.GenerationConfig._get_default_generation_params())
    need(GENERATION, "*", [name for name in vars(transformers.GenerationConfig())])
    need(ADAPTER, "*", [field.name for field in dataclasses.fields(peft.LoraConfig)])
    base = inspect.getsource(transformers.PreTrainedTokenizerBase.__init__)
    need(TOKENIZER_CONFIG, "*", [part.split('"')[1] for part in base.split("kwargs.pop(")[1:] if part.startswith('"')])
    for name in CLASSES:
        arguments = inspect.signature(getattr(transformers, name).__init__).parameters
        need(TOKENIZER_CONFIG, name, [each for each in arguments if each not in ("self", "kwargs") and not each.startswith("_spm")])
    return missing


def write():
    quote = lambda text: json.dumps(text, ensure_ascii=False)  # noqa: E731
    lines = ["// Made by tools/golden/keys.py. Do not edit.\n"]
    for (file, of, key), (use, values) in sorted(rows.items()):
        text = json.dumps(values) if use == "refused" else ""
        lines.append(f"{{{quote(file)}, {quote(of)}, {quote(key)}, KeyUse::{use}, {quote(text)}}},\n")
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text("".join(lines))
    print(len(lines), "lines")


fill()


def opened_files():
    """{file of a folder: which calls of the reference open it}"""
    import tempfile

    import reference
    import transformers

    reference.quiet()
    calls, opened, now = {}, {}, ["", ""]

    def hook(event, arguments):
        if event == "open" and now[0] and isinstance(arguments[0], str) and arguments[0].startswith(now[1]):
            opened.setdefault(arguments[0].removeprefix(now[1]).split("/", 1)[-1], set()).add(now[0])

    sys.addaudithook(hook)
    with tempfile.TemporaryDirectory() as work:
        for case in reference.cases():
            folder = pathlib.Path(work) / case.name
            case.build(folder)
            for name, value in [(SPECIAL, {}), (ADDED, {}), ("processor_config.json", {}), ("preprocessor_config.json", {}),
                                ("chat_template.json", {}), (GENERATION, {}), ("vocab.json", {}), ("modules.json", {}), ("adapter.json", {})]:
                if not (folder / name).exists() and case.kind != "generate":
                    reference.write_json(folder / name, value)
            now[1] = str(folder)
            calls = {"model": lambda: case.reference(folder)}
            if case.kind == "encode":
                calls = {"AutoTokenizer": lambda: transformers.AutoTokenizer.from_pretrained(folder)}
            elif case.kind == "logits":
                calls |= {"AutoConfig": lambda: transformers.AutoConfig.from_pretrained(folder),
                          "GenerationConfig": lambda: transformers.GenerationConfig.from_pretrained(folder)}
            elif case.kind == "adapter":
                calls = {"PeftModel": lambda: case.reference(folder)}
            for now[0], call in calls.items():
                reference.outcome(lambda: {"result": call()})
            now[0] = ""
    return {name: sorted(which) for name, which in sorted(opened.items()) if not name.endswith(".base")}


def show_opens():
    missing = []
    for name, which in opened_files().items():
        known = any(file == name for file, _, _ in rows)
        print(f"{name:32} {', '.join(which)}")
        if name.endswith(".json") and not known and name != "vocab.json":
            missing.append(name)
    for name in missing:
        print("no rows:", name)
    return missing


VALUES = [True, False, 3, "other", ["other"], {"other": 1}]


def verify():
    """Changes each neutral key in the reference alone, and each refused one, in one case of each family."""
    import shutil
    import tempfile

    import key_changes
    import reference

    reference.quiet()
    wrong, silent, done, bites = [], [], set(), {}
    with tempfile.TemporaryDirectory() as work:
        for case in reference.cases():
            folder, changed = pathlib.Path(work) / case.name, pathlib.Path(work) / "changed"
            case.build(folder)
            plain = case.reference(folder)
            for file in (CONFIG, GENERATION, ADAPTER, TOKENIZER_CONFIG):
                if not (folder / file).exists() or case.kind not in {CONFIG: ["logits"], GENERATION: ["generate"]}.get(file, [case.kind]):
                    continue
                of = key_changes.part_of(case, file, {}, ("",))
                document = reference.read_json(folder / file)
                for (row_file, row_of, key), _ in sorted(rows.items()):
                    use, accepted = find(file, of, key) or ("", [])
                    place = (file, key, of.split(":")[0] in DECODERS if row_of == "*" else of)
                    if row_file != file or row_of not in ("*", of, of.split(":")[0]) or use in ("used", "") or key[0] == "*" or place in done:
                        continue
                    done.add(place)
                    for value in [*VALUES, *accepted, *key_changes.LEGAL.get(key, [])]:
                        shutil.rmtree(changed, ignore_errors=True)
                        shutil.copytree(folder, changed)
                        reference.write_json(changed / file, document | {key: value})
                        made = case.reference(changed)
                        same = "error" not in made and not reference.equal(plain, made) and "random" not in made
                        if use == "neutral" and not same and "error" not in made:
                            wrong.append((case.name, file, of, key, value))
                        if use == "refused":
                            allowed = value in accepted and not (isinstance(value, bool) != isinstance(accepted[accepted.index(value)], bool))
                            if allowed and not same and "error" not in made:
                                wrong.append((case.name, file, of, key, value))
                            bites[file, row_of, key] = bites.get((file, row_of, key), False) or not same
    silent = [place for place, bit in sorted(bites.items()) if not bit]
    for row in wrong:
        print("not so:", *row, flush=True)
    for row in silent:
        print("refused, but it never changes the reference's output:", *row)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--opens", action="store_true")
    options = parser.parse_args()
    missing = missing_rows()
    for row in missing:
        print("no row:", *row)
    if options.verify:
        missing += verify()
    elif options.opens:
        missing += show_opens()
    elif not missing:
        write()
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
