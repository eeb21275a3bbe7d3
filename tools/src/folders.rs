//! Samara's folders among the user's own.

use std::path::PathBuf;

/// `samara` in the folder that the variable `xdg` names, or in `home` below the user's home; on Windows in that for
/// local data. `None` where the environment says nothing usable.
pub(crate) fn samara(xdg: &str, home: &str) -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = if cfg!(windows) {
        absolute("LOCALAPPDATA")
    } else {
        absolute(xdg).or_else(|| absolute("HOME").map(|user| user.join(home)))
    };
    folder.map(|folder| folder.join("samara"))
}
