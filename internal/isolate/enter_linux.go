package isolate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"

	"culvert.dev/internal/capture"
	"culvert.dev/internal/capture/route"
)

// server is where programs in the namespace find their DNS server.
var server = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// Enter is what the process of Start does: it sets up the namespaces that it was started in,
// hands their sockets over and becomes the program. It returns only where that fails, with an
// exit code.
func Enter(ctx context.Context, args []string) (int, error) {
	peer := os.NewFile(3, "isolated")
	if peer == nil || len(args) == 0 {
		return NotSetUp, errors.New("only culvert exec starts this command")
	}
	syscall.CloseOnExec(3)
	if err := setUp(ctx, peer); err != nil {
		_ = syscall.Sendmsg(3, []byte("!"+err.Error()), nil, nil, 0)
		return NotSetUp, err
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return NotFound, err
	}
	// The program has none of the capabilities. They are the thread's.
	runtime.LockOSThread()
	const capAmbient, clearAll = 47, 4 // PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
	if _, _, errno := syscall.RawSyscall6(syscall.SYS_PRCTL, capAmbient, clearAll, 0, 0, 0, 0); errno != 0 {
		return NotSetUp, fmt.Errorf("give up the capabilities: %w", errno)
	}
	err = syscall.Exec(path, args, os.Environ())
	return CannotRun, fmt.Errorf("run %s: %w", path, err)
}

// setUp makes the network of the namespace and sends its sockets.
func setUp(ctx context.Context, peer *os.File) error {
	routes, err := route.Open()
	if err != nil {
		return err
	}
	defer routes.Close()
	if err := routes.SetUp("lo"); err != nil {
		return err
	}
	// Packets need a way before a rule redirects them. None leaves the namespace.
	if err := routes.AddRoute(route.Route{To: netip.MustParsePrefix("0.0.0.0/0"), From: server}); err != nil {
		return err
	}
	hasIPv6 := routes.AddRoute(route.Route{To: netip.MustParsePrefix("::/0"), From: netip.IPv6Loopback()}) == nil
	if err := resolveHere(); err != nil {
		return err
	}
	var files []*os.File
	var kinds []byte
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	keep := func(kind byte, f *os.File, err error) error {
		if err == nil {
			files, kinds = append(files, f), append(kinds, kind)
		}
		return err
	}
	listen := func(kind byte, addr string) (port uint16, err error) {
		ln, err := (&net.ListenConfig{KeepAlive: -1}).Listen(ctx, "tcp", addr)
		if err != nil {
			return 0, err
		}
		defer ln.Close()
		tcp := ln.(*net.TCPListener)
		f, err := tcp.File()
		return tcp.Addr().(*net.TCPAddr).AddrPort().Port(), keep(kind, f, err)
	}
	port, err := listen(captured4, net.JoinHostPort(server.String(), "0"))
	if err != nil {
		return err
	}
	if hasIPv6 {
		if _, err := listen(captured6, net.JoinHostPort("::1", strconv.Itoa(int(port)))); err != nil {
			return err
		}
	}
	for _, host := range []string{server.String(), "::1"} {
		if host == "::1" && !hasIPv6 {
			continue
		}
		if _, err := listen(dnsTCP, net.JoinHostPort(host, "53")); err != nil {
			return err
		}
		c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(netip.MustParseAddr(host), 53)))
		if err != nil {
			return err
		}
		f, err := c.File()
		_ = c.Close()
		if err := keep(dnsUDP, f, err); err != nil {
			return err
		}
	}
	rules, err := capture.Install(capture.Rules{All: true, Port: port, DNSPort: 53, Stay: true})
	if err != nil {
		return err
	}
	if err := rules.Close(); err != nil {
		return err
	}
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	return os.NewSyscallError("sendmsg", syscall.Sendmsg(int(peer.Fd()), kinds, syscall.UnixRights(fds...), nil, 0))
}

// resolvers are sockets by which programs look names up without DNS.
var resolvers = []string{
	"/run/systemd/resolve/io.systemd.Resolve", "/run/systemd/resolve/io.systemd.Resolve.Monitor",
	"/run/nscd/socket", "/var/run/nscd/socket", "/run/avahi-daemon/socket",
}

// resolveHere has programs ask the DNS server of the namespace: by another resolv.conf, in the
// namespace of mounts.
func resolveHere() error {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("separate the mounts: %w", err)
	}
	f, err := os.CreateTemp("", "culvert-resolv-*.conf")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // the mount keeps it
	_, err = f.WriteString("# Made by culvert exec.\nnameserver " + server.String() + "\noptions timeout:5 attempts:2\n")
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	if err := syscall.Mount(f.Name(), "/etc/resolv.conf", "", syscall.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount another /etc/resolv.conf: %w", err)
	}
	for _, socket := range resolvers {
		if _, err := os.Stat(socket); err != nil {
			continue
		}
		if err := syscall.Mount("/dev/null", socket, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("hide %s: %w", socket, err)
		}
	}
	return nil
}
