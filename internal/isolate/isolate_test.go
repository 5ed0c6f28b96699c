//go:build linux && netns

package isolate

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// TestMain enters the namespaces where a test has started this program to do so.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "isolated" {
		code, err := Enter(context.Background(), os.Args[2:])
		fmt.Fprintln(os.Stderr, err)
		os.Exit(code)
	}
	testnet.Main(m)
}

func isolated(args ...string) (*exec.Cmd, *bytes.Buffer) {
	var out bytes.Buffer
	cmd := exec.Command(os.Args[0], append([]string{"isolated"}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &out
	return cmd, &out
}

// A connection of the program comes to the sockets of the namespace, with the address that
// the program has asked for, and the exit code is the program's.
func TestConnectionsAreCaptured(t *testing.T) {
	cmd, out := isolated("bash", "-c", "exec 3<>/dev/tcp/192.0.2.7/8443; cat <&3; exit 7")
	s, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ln := s.Captured[0]
	if err := ln.(*net.TCPListener).SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if to, ok := tunnel.OriginalDestination(c); !ok || to != netip.MustParseAddrPort("192.0.2.7:8443") {
		t.Errorf("the program has asked for %v, %t; want 192.0.2.7:8443", to, ok)
	}
	if _, err := c.Write([]byte("an answer")); err != nil {
		t.Error(err)
	}
	_ = c.Close()
	if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != 7 || out.String() != "an answer" {
		t.Errorf("exit code %d and %q, want 7 and the answer", cmd.ProcessState.ExitCode(), out)
	}
}

// A program that is not there has its own exit code.
func TestProgramThatIsNotThere(t *testing.T) {
	cmd, out := isolated("culvert-no-such-program")
	s, err := Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _ = cmd.Wait(); cmd.ProcessState.ExitCode() != NotFound || !strings.Contains(out.String(), "culvert-no-such-program") {
		t.Errorf("exit code %d and %q, want %d", cmd.ProcessState.ExitCode(), out, NotFound)
	}
}
