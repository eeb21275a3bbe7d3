//! The kernels that were fastest on this machine, kept between runs so that they are measured once for each model.
//!
//! A file for each model in the user's folder for caches. It is a convenience: without a place for it, or with a file that does
//! not fit, kernels are measured again.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use samara_runtime::{Choices, KernelId, Model, Speed};
use serde::{Deserialize, Serialize};

use crate::{folders, machine::Machine};

/// What the file says. Another version, CPU or set of features has other kernels.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Stored {
    version: String,
    cpu: String,
    features: Vec<String>,
    /// By backend and shape of a block: the kernels, as `--explain` prints them.
    kernels: BTreeMap<String, Vec<String>>,
    /// By backend and device: seconds of a layer, of the head, of a step beside them.
    speeds: BTreeMap<String, [f64; 3]>,
}

/// What was chosen for this model on this machine before.
pub(crate) fn load(model: &Model) -> Choices {
    let stored = path(model).and_then(|path| read(&path));
    let of_here = |stored: &Stored| *stored == of_here(stored.kernels.clone(), stored.speeds.clone());
    let Some(stored) = stored.filter(of_here) else { return Choices::default() };
    let ids = |ids: Vec<String>| {
        ids.iter()
            .filter_map(|id| id.split_once('/'))
            .map(|(op, variant)| KernelId::new(op, variant))
            .collect()
    };
    let speed = |[layer, head, step]: [f64; 3]| Speed { layer, head, step };
    Choices {
        kernels: stored.kernels.into_iter().map(|(shape, list)| (shape, ids(list))).collect(),
        speeds: stored.speeds.into_iter().map(|(what, seconds)| (what, speed(seconds))).collect(),
    }
}

/// Keeps `choices` if there is a place for them.
pub(crate) fn save(model: &Model, choices: &Choices) {
    let names = |ids: &Vec<KernelId>| ids.iter().map(ToString::to_string).collect();
    let kernels = choices.kernels.iter().map(|(shape, ids)| (shape.clone(), names(ids))).collect();
    let seconds = |speed: &Speed| {
        let Speed { layer, head, step } = *speed;
        [layer, head, step]
    };
    let speeds = choices.speeds.iter().map(|(what, speed)| (what.clone(), seconds(speed))).collect();
    if let Some(path) = path(model) {
        // Not being able to is no reason to fail.
        let _ = write(&path, &of_here(kernels, speeds));
    }
}

fn of_here(kernels: BTreeMap<String, Vec<String>>, speeds: BTreeMap<String, [f64; 3]>) -> Stored {
    let machine = Machine::detect();
    Stored {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cpu: machine.cpu,
        features: machine.features.iter().map(ToString::to_string).collect(),
        kernels,
        speeds,
    }
}

fn read(path: &Path) -> Option<Stored> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Under another name first: another process may read it meanwhile.
fn write(path: &Path, stored: &Stored) -> std::io::Result<()> {
    let part = path.with_extension(format!("{}.part", std::process::id()));
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    let written = serde_json::to_vec_pretty(stored)
        .map_err(std::io::Error::from)
        .and_then(|text| std::fs::write(&part, text))
        .and_then(|()| std::fs::rename(&part, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    written
}

/// `samara/kernels/DIGEST.json` in the user's folder for caches.
fn path(model: &Model) -> Option<PathBuf> {
    let name = format!("{:032x}.json", model.file().index().header().digest());
    folders::samara("XDG_CACHE_HOME", ".cache").map(|folder| folder.join("kernels").join(name))
}
