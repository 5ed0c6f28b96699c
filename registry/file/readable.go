package file

import (
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"go.yaml.in/yaml/v3"
)

// warnReadable is warnFile for a file that n names, relative to the one at path.
func (d *decoder) warnReadable(path string, n *yaml.Node) {
	if n == nil || n.Kind != yaml.ScalarNode || n.Value == "" {
		return
	}
	name := n.Value
	if !filepath.IsAbs(name) {
		name = filepath.Join(filepath.Dir(path), name)
	}
	d.warnFile(n, name)
}

// warnFile warns of a file with secrets that everybody on this host may read.
func (d *decoder) warnFile(n *yaml.Node, name string) {
	info, err := os.Stat(name)
	if err != nil || runtime.GOOS == "windows" { // its mode bits say nothing of this
		return
	}
	if mode := info.Mode().Perm(); mode&0o004 != 0 && reachable(name) {
		d.warnf(n, "chmod o-r it", "%q may be read by everybody on this host (mode %s)", name, mode)
	}
}

// reachable reports whether others on this host can get to a file at all. They can't
// where they may not enter one of its directories, and a volume of Kubernetes, whose
// files have mode 0644 by default, is in the container alone.
func reachable(name string) bool {
	real, err := filepath.EvalSymlinks(name)
	if err == nil {
		real, err = filepath.Abs(real)
	}
	if err != nil {
		return true
	}
	for dir := filepath.Dir(real); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		if err == nil && info.Mode().Perm()&0o001 == 0 || isVolume(dir) {
			return false
		}
		if dir == filepath.Dir(dir) {
			return true
		}
	}
}

// isVolume reports whether dir holds a version of a Secret, ConfigMap or projected
// volume of Kubernetes: "..2026_01_31_12_00_00.123456789", to which a symbolic link
// "..data" beside it leads.
func isVolume(dir string) bool {
	if !strings.HasPrefix(filepath.Base(dir), "..") {
		return false
	}
	to, err := os.Readlink(filepath.Join(filepath.Dir(dir), "..data"))
	return err == nil && filepath.Base(to) == filepath.Base(dir)
}
