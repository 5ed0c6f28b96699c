package hostdns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// deviceAddress is the address of the interface, which systemd-resolved wants it to have. It is
// of a range for benchmarks (RFC 2544), which no network uses.
var deviceAddress = netip.AddrFrom4([4]byte{198, 19, 255, 255})

// A device is a network interface that goes with the process: a tun device, which nothing is
// sent to.
type device struct {
	file  *os.File
	name  string
	index int
}

// newDevice makes a device and takes it up, in the network namespace of the thread.
func newDevice() (d *device, err error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make a network interface by /dev/net/tun: %w", rights(err))
	}
	d = &device{file: os.NewFile(uintptr(fd), "/dev/net/tun")}
	defer func() {
		if err != nil {
			_ = d.Close()
		}
	}()
	ifr, err := unix.NewIfreq("culvert%d")
	if err != nil {
		return nil, err
	}
	ifr.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return nil, fmt.Errorf("make a network interface: %w", rights(err))
	}
	d.name = ifr.Name()
	if err := d.setUp(); err != nil {
		return nil, fmt.Errorf("set up the network interface %s: %w", d.name, err)
	}
	dev, err := net.InterfaceByName(d.name)
	if err != nil {
		return nil, fmt.Errorf("find the network interface %s: %w", d.name, err)
	}
	d.index = dev.Index
	return d, nil
}

// rights adds to an error what right is missing.
func rights(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w: it needs root, or CAP_NET_ADMIN", err)
	}
	return err
}

// setUp gives the device its address, and takes it up.
func (d *device) setUp() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr, err := unix.NewIfreq(d.name)
	if err != nil {
		return err
	}
	if err := errors.Join(ifr.SetInet4Addr(deviceAddress.AsSlice()), unix.IoctlIfreq(s, unix.SIOCSIFADDR, ifr)); err != nil {
		return err
	}
	if err := errors.Join(ifr.SetInet4Addr([]byte{255, 255, 255, 255}), unix.IoctlIfreq(s, unix.SIOCSIFNETMASK, ifr)); err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_POINTOPOINT | unix.IFF_NOARP)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, ifr)
}

// Close removes the device.
func (d *device) Close() error { return d.file.Close() }
