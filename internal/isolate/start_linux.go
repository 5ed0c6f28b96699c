package isolate

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
)

// Capabilities that Enter has within the namespaces.
const (
	capNetBindService = 10
	capNetAdmin       = 12
	capSysAdmin       = 21
)

const maxSockets = 8

// Start starts cmd, which calls Enter, in namespaces of its own, and returns their sockets. The
// caller closes those, and waits for cmd.
func Start(cmd *exec.Cmd) (*Sockets, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer ours.Close()
	if len(cmd.ExtraFiles) != 0 {
		return nil, errors.New("isolate: the command has files already")
	}
	cmd.ExtraFiles = []*os.File{theirs} // descriptor 3
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	if uid, gid := os.Geteuid(), os.Getegid(); uid != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: gid, Size: 1}}
		attr.AmbientCaps = []uintptr{capNetBindService, capNetAdmin, capSysAdmin}
	}
	cmd.SysProcAttr = attr
	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return nil, &Unavailable{fmt.Errorf("make namespaces of user, network and mounts: %w", err)}
	}
	s, err := receive(ours)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, err
	}
	return s, nil
}

// socketPair returns the two ends of a Unix socket that keeps messages apart.
func socketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	file := os.NewFile(uintptr(fds[0]), "isolated")
	defer file.Close()
	theirs = os.NewFile(uintptr(fds[1]), "isolated")
	c, err := net.FileConn(file)
	if err != nil {
		_ = theirs.Close()
		return nil, nil, err
	}
	return c.(*net.UnixConn), theirs, nil
}

// receive reads the one message of Enter: a letter for each descriptor that it brings, or "!"
// and an error.
func receive(c *net.UnixConn) (*Sockets, error) {
	text, oob := make([]byte, 4096), make([]byte, syscall.CmsgSpace(4*maxSockets))
	n, oobn, _, _, err := c.ReadMsgUnix(text, oob)
	switch {
	case err != nil:
		return nil, fmt.Errorf("set up the namespace: %w", err)
	case n == 0:
		return nil, errors.New("set up the namespace: the process has ended")
	case text[0] == '!':
		return nil, &Unavailable{fmt.Errorf("set up the namespace: %s", text[1:n])}
	}
	messages, err := syscall.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("set up the namespace: no descriptors came: %w", errors.Join(err))
	}
	fds, err := syscall.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, fmt.Errorf("set up the namespace: %w", err)
	}
	s := &Sockets{}
	var failed error
	for i, fd := range fds {
		syscall.CloseOnExec(fd)
		f := os.NewFile(uintptr(fd), "isolated")
		kind := byte(0)
		if i < n {
			kind = text[i]
		}
		failed = errors.Join(failed, s.add(kind, f))
		_ = f.Close()
	}
	if failed != nil {
		s.Close()
		return nil, fmt.Errorf("set up the namespace: %w", failed)
	}
	return s, nil
}

// Letters of sockets.
const (
	captured4 = 't'
	captured6 = 'T'
	dnsUDP    = 'u'
	dnsTCP    = 'd'
)

func (s *Sockets) add(kind byte, f *os.File) error {
	if kind == dnsUDP {
		c, err := net.FilePacketConn(f)
		if err != nil {
			return err
		}
		s.DNS = append(s.DNS, c.(*net.UDPConn))
		return nil
	}
	ln, err := net.FileListener(f)
	if err != nil {
		return err
	}
	switch kind {
	case captured6:
		s.IPv6 = true
		s.Captured = append(s.Captured, ln)
	case captured4:
		s.Captured = append(s.Captured, ln)
	case dnsTCP:
		s.DNSOverTCP = append(s.DNSOverTCP, ln)
	default:
		_ = ln.Close()
		return fmt.Errorf("there is no socket of kind %q", kind)
	}
	return nil
}
