//go:build unix

package hostdns

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
)

// savedSuffix is what the file from before is called beside resolv.conf, which it goes back to.
const savedSuffix = ".culvert"

const (
	maxResolvConf  = 1 << 20 // bytes of resolv.conf
	maxNameservers = 3       // that the C library reads
)

// Saved returns where the file at path is while an agent has another one in its place.
func Saved(path string) string { return path + savedSuffix }

// A ResolvConf is a resolv.conf with the server of this process in front of the others.
type ResolvConf struct {
	path  string
	own   *os.File // the file that was written, with its lock
	alive *os.File // the end of a pipe: it closes with this process
	cmd   *exec.Cmd
	ended chan struct{} // closed when cmd has ended
	once  sync.Once
	err   error
}

// UseResolvConf puts a file in the place of path that names s.Server first, and keeps the file
// from before at Saved(path). It starts restore, which calls Restore, to bring that file back
// when this process ends, however it ends. A copy that a crash of both has left is brought back
// before. The caller closes the ResolvConf.
func UseResolvConf(path string, s Settings, restore *exec.Cmd, log *slog.Logger) (*ResolvConf, error) {
	if s.Server.Port() != 53 {
		return nil, fmt.Errorf("%s has no ports: the server must be at port 53, and is at %s", path, s.Server)
	}
	if err := mend(path, log); err != nil {
		return nil, err
	}
	before, err := readLimited(path)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if err := checkManager(path, before, log); err != nil {
		return nil, err
	}
	own, err := replace(path, contentFor(path, &s, before))
	if err != nil {
		return nil, fmt.Errorf("replace %s: %w", path, err)
	}
	r := &ResolvConf{path: path, own: own, cmd: restore, ended: make(chan struct{})}
	if err := r.start(); err != nil {
		return nil, errors.Join(fmt.Errorf("start the process that brings %s back: %w", path, err), bringBack(path), own.Close())
	}
	return r, nil
}

// start starts the process that restores.
func (r *ResolvConf) start() error {
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	r.cmd.ExtraFiles = []*os.File{read, r.own} // descriptors 3 and 4
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := r.cmd.Start(); err != nil {
		_ = write.Close()
		return err
	}
	r.alive = write
	go func() { defer close(r.ended); _ = r.cmd.Wait() }()
	return nil
}

// Close brings the file from before back. It may be called more than once.
func (r *ResolvConf) Close() error {
	r.once.Do(func() {
		_ = r.alive.Close()
		<-r.ended
		if _, err := os.Lstat(Saved(r.path)); err == nil { // that process was killed
			r.err = bringBack(r.path)
		}
		_ = r.own.Close()
	})
	return r.err
}

// Restore is what the process of UseResolvConf does: it waits for the end of the other one, and
// brings the file back. A signal that ends the other one does not end it.
func Restore(path string) error {
	alive := os.NewFile(3, "agent")
	if alive == nil {
		return errors.New("only culvert agent starts this command")
	}
	if _, err := io.Copy(io.Discard, alive); err != nil {
		return err
	}
	return bringBack(path)
}

// A Changed is the error of a resolv.conf that another program has written meanwhile. It stays.
type Changed struct{ Path string }

func (e *Changed) Error() string {
	return fmt.Sprintf("%s was changed by another program; it stays as it is now", e.Path)
}

// bringBack puts the file from before in its place again, unless another program has written
// there: then that stays, and the error is a Changed.
func bringBack(path string) error {
	now, err := readLimited(path)
	if err == nil && isOurs(now) {
		return os.Rename(Saved(path), path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Remove(Saved(path)); err != nil {
		return err
	}
	return &Changed{path}
}

// mend brings back what a crash has left, and fails where another agent is at work.
func mend(path string, log *slog.Logger) error {
	if _, err := os.Lstat(Saved(path)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	f, err := os.Open(path)
	if err == nil {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
		_ = f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return fmt.Errorf("another agent has replaced %s already", path)
		}
	}
	var changed *Changed
	if err := bringBack(path); errors.As(err, &changed) {
		log.Warn("the file of an earlier agent was changed by another program; it stays as it is now", "file", path)
		return nil
	} else if err != nil {
		return fmt.Errorf("bring back %s of an earlier agent: %w", path, err)
	}
	log.Info("brought back what an earlier agent has replaced", "file", path)
	return nil
}

// checkManager looks whose file it is.
func checkManager(path string, content []byte, log *slog.Logger) error {
	target, _ := filepath.EvalSymlinks(path)
	text := string(content)
	switch {
	case strings.Contains(target, "/systemd/resolve/") || strings.Contains(text, "\nnameserver 127.0.0.53\n"):
		return fmt.Errorf("%s leads to systemd-resolved, which writes it: use install: systemd-resolved", path)
	case strings.Contains(text, "Generated by NetworkManager"), strings.Contains(target, "NetworkManager"):
		log.Warn("NetworkManager writes this file, and will replace the agent in it when the network changes", "file", path)
	case strings.Contains(target, "/resolvconf/"), strings.Contains(text, "resolvconf"):
		log.Warn("resolvconf writes this file, and will replace the agent in it when the network changes", "file", path)
	}
	return nil
}

// replace keeps the file at path beside it, and puts another one in its place, in one step. It
// returns that one, which is locked for as long as it is open.
func replace(path string, content []byte) (own *os.File, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
			_ = f.Close()
		}
	}()
	if _, err = f.Write(content); err == nil {
		err = f.Chmod(0o644)
	}
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	if err == nil {
		err = os.Link(path, Saved(path)) // of a symbolic link, the link
	}
	if err != nil {
		return nil, err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		_ = os.Remove(Saved(path))
		return nil, err
	}
	return f, nil
}

const (
	firstLine = "# Made by culvert agent: it answers its names, and asks the others. The file from before is %s,\n# and comes back when the agent ends.\n"
	sumPrefix = "# sha256 "
)

// contentFor returns what is written: the server first, and all else as before.
func contentFor(path string, s *Settings, before []byte) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, firstLine, Saved(path))
	fmt.Fprintf(&b, "nameserver %s\n", s.Server.Addr().Unmap())
	servers := 1
	for line := range strings.Lines(string(before)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") || strings.HasPrefix(fields[0], ";") {
			continue
		}
		if fields[0] == "nameserver" {
			if servers++; servers > maxNameservers {
				continue
			}
		}
		b.WriteString(strings.TrimRight(line, "\r\n") + "\n")
	}
	return []byte(b.String() + sumPrefix + sumOf(b.String()) + "\n")
}

func sumOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// isOurs reports whether content is as contentFor has made it.
func isOurs(content []byte) bool {
	at := bytes.LastIndex(content, []byte(sumPrefix))
	return at > 0 && string(content[at:]) == sumPrefix+sumOf(string(content[:at]))+"\n"
}

func readLimited(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	content, err := io.ReadAll(io.LimitReader(f, maxResolvConf+1))
	if err == nil && len(content) > maxResolvConf {
		err = fmt.Errorf("it has more than %d bytes", maxResolvConf)
	}
	return content, err
}
