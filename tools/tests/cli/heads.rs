//! `--head`: heads that leave rows out, from a conversion to an answer.

use std::{fs, path::Path};

use serde_json::Value;

use crate::program::{Ran, emulated, fixture, folder, plain, run, tiny};

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn answer(model: &Path, more: &[&str]) -> Ran {
    let most = if emulated() { "6" } else { "80" };
    let args = ["run", plain(model), "-q", "-p", "462+520=", "--seed", "3", "--max-tokens", most];
    run(args.iter().chain(more)).expect(0)
}

#[test]
fn a_certified_answer_is_the_exact_one() {
    for sampling in [["--temp", "0"], ["--temp", "1.5"]] {
        let exact = answer(tiny(), &sampling);
        let certified =
            answer(tiny(), &[sampling.as_slice(), &["--head", "certified", "--probes", "3"]].concat());
        assert_eq!(exact.out, certified.out, "{sampling:?}");
    }
    let flash = answer(tiny(), &["--temp", "0", "--head", "flash"]);
    assert!(flash.out.starts_with("462 + 520"), "{}", flash.out);
    let record = answer(tiny(), &["--temp", "0", "--head", "certified", "--probes", "128", "--json"]).json();
    assert_eq!(record["head"]["certified_share"], 1.0, "{record}");
    assert!(answer(tiny(), &["--json"]).json()["head"].is_null());
}

#[test]
fn ppl_and_bench_compare_a_head_with_the_exact_one() {
    let dir = folder();
    let text = dir.path().join("text.txt");
    fs::write(&text, "462 + 520: 2 + 0 = 2, write 2; 6 + 2 = 8, write 8; 4 + 5 = 9, write 9.")
        .expect("writes");
    let ppl = |more: &[&str]| {
        let args = ["ppl", plain(tiny()), "--file", plain(&text), "--json", "--device", "cpu"];
        run(args.iter().chain(more)).expect(0).json()
    };
    let exact = ppl(&[]);
    assert!(exact["head"].is_null(), "{exact}");
    let certified = ppl(&["--head", "certified"]);
    let head = &certified["head"];
    assert_eq!(certified["nll"], exact["nll"], "of the exact head");
    assert_eq!(
        (&head["mode"], &head["n_probes"], &head["top_k"]),
        (&"certified".into(), &14.into(), &20.into())
    );
    assert_eq!((number(&head["argmax_agreement"]), number(&head["top20_overlap"])), (1.0, 1.0), "{head}");
    assert_eq!(number(&head["positions"]), number(&certified["tokens"]) + 1.0);
    let one = &ppl(&["--head", "certified", "--top-k", "1", "--probes", "40"])["head"];
    assert_eq!((number(&one["argmax_agreement"]), number(&one["certified_share"])), (1.0, 1.0), "{one}");
    assert!(number(&one["share_of_exact_bytes"]) < 0.5, "{one}");
    let flash = &ppl(&["--head", "flash", "--probes", "1"])["head"];
    assert!(flash["certified_share"].is_null() && number(&flash["argmax_agreement"]) < 1.0, "{flash}");
    assert!(number(&flash["mass_outside"]) > 0.0 && number(&flash["kl_mean"]) > 0.0, "{flash}");
    assert!(number(&flash["bytes_per_token"]) < number(&one["bytes_per_token"]), "{flash}");
    let shown = run(["ppl", plain(tiny()), "--file", plain(&text), "--head", "flash"]).expect(0);
    assert!(shown.out.contains("flash head with 14 probes: 92800 bytes a token, 14.2 %"), "{}", shown.out);

    let bench = |head: &str| {
        let args =
            ["bench", plain(tiny()), "-p", "8", "-n", "6", "--repetitions", "1", "--no-bandwidth", "--json"];
        run(args.iter().chain(&["--device", "cpu", "--head", head])).expect(0).json()
    };
    let (exact, flash, certified) = (bench("exact"), bench("flash"), bench("certified"));
    assert!(exact["head"].is_null() && certified["head"]["argmax_agreement"] == 1.0, "{certified}");
    let weights = |record: &Value| number(&record["decode"]["weight_bytes_per_token"]);
    let saved = weights(&exact) - weights(&flash);
    let head = number(&flash["head"]["bytes_per_token"]);
    assert!((head / number(&flash["head"]["share_of_exact_bytes"]) - head - saved).abs() < 2.0, "{flash}");
    assert!(weights(&flash) < weights(&certified) && weights(&certified) < weights(&exact));
    assert_ne!(exact["logits_hash"], certified["logits_hash"], "what is left out is -infinity");
}

#[test]
fn heads_that_cannot_be_had_are_refused() {
    let dir = folder();
    let plainly = dir.path().join("plain.samara");
    let convert = |more: &[&str]| {
        let checkpoint = fixture("tiny-maple-2bit");
        run(["convert", plain(&checkpoint), "-o", plain(&plainly), "--force"].iter().chain(more)).expect(0)
    };
    convert(&["--flash-head", "none"]);
    let refused = run(["run", plain(&plainly), "-p", "x", "--head", "flash"]).expect(2);
    assert!(refused.error().contains("--flash-head build"), "{}", refused.err);
    convert(&["--flash-head", "build", "--cluster-size", "64"]);
    let built = answer(&plainly, &["--temp", "0", "--head", "certified"]);
    assert_eq!(built.out, answer(tiny(), &["--temp", "0"]).out);
    for (args, wanted) in [
        (["--head", "flash", "--probes", "65"], "from 1 to 64"),
        (["--head", "certified", "--probes", "0"], "--probes"),
        (["--head", "exact", "--probes", "3"], "--probes is for --head flash"),
        (["--head", "best", "--probes", "3"], "give exact, flash or certified"),
    ] {
        let refused = run(["run", plain(&plainly), "-p", "x"].iter().chain(&args)).expect(2);
        assert!(refused.error().contains(wanted), "{args:?}: {}", refused.err);
    }
    let golden = fixture("golden/tiny-maple.safetensors");
    let refused = run(["ppl", plain(tiny()), "--logits", plain(&golden), "--head", "flash"]).expect(2);
    assert!(refused.error().contains("--file"), "{}", refused.err);
}
