package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"testing"

	"github.com/go-logr/logr"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// inside is set in the environment of the process in the sandbox.
const inside = "CULVERT_CLUSTER_INSIDE"

// Main is for a package's TestMain and takes the place of os.Exit(m.Run()). It
// builds the programs that clusters need, and runs the tests as a child in new
// network, mount and process namespaces: the machine's network and mounts are
// not touched, and whatever the tests leave running dies with the child,
// however the child or its parent ends. It fails a run that leaves goroutines.
//
// It needs root and the program ip (iproute2).
func Main(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	code := 0
	if os.Getenv(inside) == "" {
		code, err = enter()
	} else if err = furnish(); err == nil {
		// The clients' complaints of an API server that a test has stopped.
		klog.SetLogger(logr.Discard())
		code = m.Run()
		if code == 0 {
			err = leaks()
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "cluster: %v\n", err)
		return 1
	}
	return code
}

// enter runs this program again in the sandbox, with the same arguments.
func enter() (int, error) {
	if os.Geteuid() != 0 {
		return 0, errors.New("clusters need root, for their network namespaces")
	}
	env, err := buildPrograms()
	if err != nil {
		return 0, err
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	// The death signal comes when the thread that forked ends, so it is kept.
	runtime.LockOSThread()
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(append(os.Environ(), env...), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		Pdeathsig:  syscall.SIGKILL,
	}
	// go test sends SIGQUIT when the time is over: the child shows its goroutines.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGINT)
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("making the sandbox: %w", err)
	}
	go func() {
		for s := range signals {
			_ = cmd.Process.Signal(s)
		}
	}()
	err = cmd.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

// furnish gives the new namespaces what programs expect to find.
func furnish() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making the mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mounting /proc: %w", err)
	}
	// Names of namespaces that a test gives by ip(8) go with the sandbox.
	if _, err := os.Stat("/run/netns"); err == nil {
		if err := unix.Mount("tmpfs", "/run/netns", "tmpfs", 0, ""); err != nil {
			return fmt.Errorf("mounting /run/netns: %w", err)
		}
	}
	return ip("link set lo up")
}

// leaks finds goroutines that are still there after the tests.
func leaks() error {
	return goleak.Find(
		// The logger of client-go flushes for ever.
		goleak.IgnoreAnyFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"),
		goleak.IgnoreAnyFunction("os/signal.loop"),
	)
}
