package localuser

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

func ends(c net.Conn) (client, server netip.AddrPort) {
	return c.RemoteAddr().(*net.TCPAddr).AddrPort(), c.LocalAddr().(*net.TCPAddr).AddrPort()
}

// connectOnce is an environment variable with the address that the test binary connects to.
const connectOnce = "CULVERT_TEST_CONNECT"

func connectAndWait(t *testing.T) {
	address := os.Getenv(connectOnce)
	if address == "" {
		return
	}
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = c.Read(make([]byte, 1)) // until the other end closes it
	_ = c.Close()
}

// The user of a connection is that of the process which made it, for both families.
func TestUserIsThatOfTheProcess(t *testing.T) {
	if os.Getenv(connectOnce) != "" {
		connectAndWait(t)
		return
	}
	uids := []int{os.Getuid()}
	if os.Getuid() == 0 {
		uids = append(uids, 65534, 4242)
	}
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		for _, uid := range uids {
			ln := listen(t, address)
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run", "^TestUserIsThatOfTheProcess$")
			cmd.Env = append(os.Environ(), connectOnce+"="+ln.Addr().String(), "GOCOVERDIR=")
			cmd.Dir = "/"
			if uid != os.Getuid() {
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: 65534}}
			}
			var out strings.Builder
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			_ = ln.(*net.TCPListener).SetDeadline(time.Now().Add(30 * time.Second))
			c, err := ln.Accept()
			if err != nil {
				t.Fatalf("user %d: %v\n%s", uid, err, out.String())
			}
			client, server := ends(c)
			got, err := User(client, server)
			own := &Check{UIDs: []uint32{4242}}
			admitted := own.Admit(client, server)
			_ = c.Close()
			if err := cmd.Wait(); err != nil {
				t.Fatalf("user %d: %v\n%s", uid, err, out.String())
			}
			if err != nil || got != uint32(uid) {
				t.Errorf("%s by user %d: got %d, %v", address, uid, got, err)
			}
			if ok := uid == 0 || uid == 4242; (admitted == nil) != ok || !ok && tunnel.ReasonOf(admitted) != tunnel.Denied {
				t.Errorf("%s: user %s is admitted: %v, want %v", address, strconv.Itoa(uid), admitted, ok)
			}
		}
	}
}

// A client may see IPv4 by a socket of IPv6.
func TestUserOfAMappedAddress(t *testing.T) {
	ln := listen(t, "127.0.0.1:0")
	fd, err := syscall.Socket(syscall.AF_INET6, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	at := ln.Addr().(*net.TCPAddr).AddrPort()
	if err := syscall.Connect(fd, &syscall.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().Unmap().As16()}); err != nil {
		t.Fatal(err)
	}
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	client, server := ends(c)
	if uid, err := User(client, server); err != nil || uid != uint32(os.Getuid()) {
		t.Errorf("got user %d, %v; want %d", uid, err, os.Getuid())
	}
}

// A socket that was closed belongs to nobody, and not to user 0 whom the kernel names.
func TestClosedSocketHasNoUser(t *testing.T) {
	ln := listen(t, "127.0.0.1:0")
	d, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	client, server := ends(c)
	if _, err := User(client, server); err != nil {
		t.Fatal(err)
	}
	_ = d.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatal("the connection is open")
	}
	if uid, err := User(client, server); !errors.Is(err, errGone) {
		t.Errorf("got user %d, %v, want %v", uid, err, errGone)
	}
}

func TestOtherMachinesAreRefused(t *testing.T) {
	far := netip.MustParseAddrPort("192.0.2.1:4000")
	if _, err := User(far, far); err == nil {
		t.Error("192.0.2.1 has a user")
	}
	c := Check{lookup: func(_, _ netip.AddrPort) (uint32, error) { return 0, errGone }}
	if err := c.Admit(far, far); tunnel.ReasonOf(err) != tunnel.Denied {
		t.Errorf("got %v, want a refusal", err)
	}
}

// FuzzParseAnswer: the kernel is trusted, its layout is not.
func FuzzParseAnswer(f *testing.F) {
	client, server := netip.MustParseAddrPort("127.0.0.1:40000"), netip.MustParseAddrPort("127.0.0.1:1080")
	good := make([]byte, headerLen+answerLen)
	binary.NativeEndian.PutUint16(good[4:], sockDiagByFamily)
	putID(good[headerLen+4:], client, server)
	binary.NativeEndian.PutUint32(good[headerLen+uidOffset:], 1000)
	binary.NativeEndian.PutUint32(good[headerLen+inodeOffset:], 7)
	if uid, err := parseAnswer(good, client, server); uid != 1000 || err != nil {
		f.Fatalf("got %d, %v", uid, err)
	}
	f.Add(good)
	f.Add(good[:20])
	f.Fuzz(func(t *testing.T, b []byte) {
		if uid, err := parseAnswer(b, client, server); err != nil && uid != 0 {
			t.Errorf("user %d with error %v", uid, err)
		}
	})
}
