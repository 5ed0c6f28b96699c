//go:build netns

package unixsocket

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"

	"culvert.dev/tunnel"
)

// The user of a client is the one that the system knows, also where the client is root in a
// user namespace of its own. It needs root.
func TestUsers(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.Chmod(".", 0o755); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	name := "@culvert-test-users-" + strconv.Itoa(os.Getpid()) // which all may connect to
	ln := open(t, Config{Path: name})
	for _, tt := range []struct {
		why  string
		attr syscall.SysProcAttr
		want tunnel.Process
	}{
		{"another user", syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1234, Gid: 2345}}, tunnel.Process{UID: 1234, GID: 2345}},
		{"nobody", syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}, tunnel.Process{UID: 65534, GID: 65534}},
		{"root of a namespace", syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1234, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 2345, Size: 1}},
			Credential:  &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true},
		}, tunnel.Process{UID: 1234, GID: 2345}},
	} {
		t.Run(tt.why, func(t *testing.T) {
			cmd := exec.Command("/proc/self/fd/3")
			f, err := os.Open(exe) // the folder of the program may be closed to other users
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			cmd.ExtraFiles = []*os.File{f}
			cmd.Env = []string{childSocket + "=" + name}
			cmd.Stderr = os.Stderr
			cmd.SysProcAttr = &tt.attr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			c, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			p, ok := c.(tunnel.LocalConn).Process()
			tt.want.PID = cmd.Process.Pid
			if !ok || p != tt.want {
				t.Errorf("got %+v, %v, want %+v", p, ok, tt.want)
			}
			_ = c.Close()
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}
