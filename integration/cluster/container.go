package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// container is a program in a file system of its own, as often as it must be
// started.
type container struct {
	w    *worker
	spec *corev1.Container
	init bool

	// Set by prepare, then constant.
	root   string
	mounts []string
	path   string
	args   []string
	env    []string
	cred   *syscall.Credential

	mu       sync.Mutex // guards the following
	proc     *Process
	since    metav1.Time
	ended    metav1.Time
	restarts int32
	last     *corev1.ContainerStateTerminated
	ready    bool
	started  bool   // the startup probe, if there is one, was answered
	problem  string // why it can't be started
	refused  bool   // the pod is being deleted
}

func newContainer(w *worker, spec *corev1.Container, init bool) *container {
	return &container{w: w, spec: spec, init: init}
}

// sidecar says whether it is an init container that stays.
func (c *container) sidecar() bool {
	return c.init && c.spec.RestartPolicy != nil && *c.spec.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// prepare makes the file system and what the program is started with. It can
// be called again when it has failed.
func (c *container) prepare(v *volumes) error {
	err := c.furnish(v)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.problem = ""
	if err != nil {
		c.problem = err.Error()
	}
	return err
}

func (c *container) furnish(v *volumes) error {
	pod := c.w.spec()
	image, err := c.w.k.c.image(c.spec.Image)
	if err != nil {
		return err
	}
	if c.env, err = c.environment(pod); err != nil {
		return err
	}
	uid, gid, err := c.user(pod, image)
	if err != nil {
		return err
	}
	c.cred = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	if s := pod.Spec.SecurityContext; s != nil && s.FSGroup != nil {
		c.cred.Groups = append(c.cred.Groups, uint32(*s.FSGroup))
	}
	c.unmount()
	if err := c.makeRoot(pod, image, v); err != nil {
		return err
	}
	program := "/" + filepath.Base(image.Path)
	switch {
	case len(c.spec.Command) > 0:
		c.path, c.args = c.expand(c.spec.Command[0]), c.expandAll(c.spec.Command[1:])
		if !filepath.IsAbs(c.path) {
			c.path = "/" + c.path
		}
		c.args = append(c.args, c.expandAll(c.spec.Args)...)
	case len(c.spec.Args) > 0:
		c.path, c.args = program, c.expandAll(c.spec.Args)
	default:
		c.path, c.args = program, image.Args
	}
	return nil
}

// user is of the container's security context, the pod's or the image.
func (c *container) user(pod *corev1.Pod, image Image) (uid, gid int64, err error) {
	uid = image.UID
	nonRoot := false
	if s := pod.Spec.SecurityContext; s != nil {
		uid, gid = value(s.RunAsUser, uid), value(s.RunAsGroup, gid)
		nonRoot = value(s.RunAsNonRoot, false)
	}
	if s := c.spec.SecurityContext; s != nil {
		uid, gid = value(s.RunAsUser, uid), value(s.RunAsGroup, gid)
		nonRoot = value(s.RunAsNonRoot, nonRoot)
	}
	if nonRoot && uid == 0 {
		return 0, 0, fmt.Errorf("container has runAsNonRoot and image will run as root")
	}
	return uid, gid, nil
}

func value[T any](p *T, otherwise T) T {
	if p != nil {
		return *p
	}
	return otherwise
}

// makeRoot makes what the container sees as /: its program, /dev, /proc, the
// files of /etc that a kubelet writes, and its volumes.
func (c *container) makeRoot(pod *corev1.Pod, image Image, v *volumes) error {
	c.root = filepath.Join(c.w.dir, "containers", c.spec.Name)
	for _, d := range []string{"dev", "proc", "etc"} {
		if err := os.MkdirAll(filepath.Join(c.root, d), 0o755); err != nil {
			return err
		}
	}
	hosts := "127.0.0.1\tlocalhost\n::1\tlocalhost\n"
	for _, a := range c.w.addresses() {
		hosts += a + "\t" + pod.Name + "\n"
	}
	resolv := ""
	if dns := c.w.k.c.opts.ClusterDNS; dns.IsValid() && pod.Spec.DNSPolicy == corev1.DNSClusterFirst {
		resolv = fmt.Sprintf("nameserver %s\nsearch %s.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n", dns, pod.Namespace)
	}
	if d := pod.Spec.DNSConfig; d != nil {
		for _, n := range d.Nameservers {
			resolv += "nameserver " + n + "\n"
		}
		if len(d.Searches) > 0 {
			resolv += "search " + strings.Join(d.Searches, " ") + "\n"
		}
	}
	for file, text := range map[string]string{"hosts": hosts, "hostname": pod.Name + "\n", "resolv.conf": resolv} {
		if err := os.WriteFile(filepath.Join(c.root, "etc", file), []byte(text), 0o644); err != nil {
			return err
		}
	}
	readOnly := c.spec.SecurityContext != nil && value(c.spec.SecurityContext.ReadOnlyRootFilesystem, false)
	if err := c.bind(c.root, c.root, false); err != nil {
		return err
	}
	for from, to := range map[string]string{"/dev": "dev", "/proc": "proc", image.Path: filepath.Base(image.Path)} {
		if err := c.bind(from, filepath.Join(c.root, to), false); err != nil {
			return err
		}
	}
	for _, m := range c.spec.VolumeMounts {
		source, err := v.path(m.Name)
		if err != nil {
			return err
		}
		sub := m.SubPath
		if m.SubPathExpr != "" {
			sub = c.expand(m.SubPathExpr)
		}
		if err := c.bind(filepath.Join(source, sub), filepath.Join(c.root, m.MountPath), m.ReadOnly); err != nil {
			return fmt.Errorf("mounting %s at %s: %w", m.Name, m.MountPath, err)
		}
	}
	if readOnly {
		return unix.Mount("", c.root, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	return nil
}

// bind makes a file or folder appear at another place, which is made.
func (c *container) bind(from, to string, readOnly bool) error {
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(to, 0o755)
	} else if err = os.MkdirAll(filepath.Dir(to), 0o755); err == nil {
		err = os.WriteFile(to, nil, 0o644)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	c.mounts = append(c.mounts, to)
	if readOnly {
		return unix.Mount("", to, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	return nil
}

// unmount must be called before the file system is removed.
func (c *container) unmount() {
	for i := len(c.mounts) - 1; i >= 0; i-- {
		_ = unix.Unmount(c.mounts[i], unix.MNT_DETACH)
	}
	c.mounts = nil
}

// run starts the program and, as the pod's restartPolicy says, again. It
// returns when it isn't to be started again, true if it has succeeded, or when
// ctx ends; the program may still run then.
func (c *container) run(ctx, probing context.Context) bool {
	policy := c.w.spec().Spec.RestartPolicy
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		p, err := c.start()
		if err == nil {
			var probes sync.WaitGroup
			alive, stop := context.WithCancel(probing)
			c.probe(alive, &probes, p)
			select {
			case <-p.Done():
				stop()
				probes.Wait()
				if c.exited(p, policy) {
					return p.ExitCode() == 0
				}
			case <-ctx.Done():
				// The probes of a pod that terminates go on until it has ended.
				select {
				case <-p.Done():
				case <-probing.Done():
				}
				stop()
				probes.Wait()
				return false
			}
		}
		c.w.wake()
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

func (c *container) start() (*Process, error) {
	ns := c.w.network() // the worker's lock is never taken within the container's
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.refused {
		return nil, context.Canceled
	}
	if old := c.proc; old != nil {
		c.last = c.terminated()
		c.restarts++
	}
	dir := c.spec.WorkingDir
	if dir == "" {
		dir = "/"
	}
	cmd := &exec.Cmd{
		Path: c.path, Args: append([]string{c.path}, c.args...), Env: c.env, Dir: dir,
		SysProcAttr: &syscall.SysProcAttr{Chroot: c.root, Credential: c.cred, Setsid: true},
	}
	p, err := startProcess(c.w.namespace+"."+c.w.name+"."+c.spec.Name, c.w.k.c.logs(), ns, cmd)
	c.problem = ""
	if err != nil {
		c.problem = err.Error()
		return nil, err
	}
	c.proc, c.since, c.ready = p, metav1.Now(), false
	c.started = c.spec.StartupProbe == nil
	return p, nil
}

// exited notes the end, and says whether it was the last one.
func (c *container) exited(p *Process, policy corev1.RestartPolicy) bool {
	c.mu.Lock()
	c.ready, c.started, c.ended = false, false, metav1.Now()
	refused := c.refused
	c.mu.Unlock()
	c.w.wake()
	switch {
	case refused:
		return true
	case c.sidecar():
		return false
	case c.init:
		return p.ExitCode() == 0 || policy == corev1.RestartPolicyNever
	case policy == corev1.RestartPolicyNever:
		return true
	case policy == corev1.RestartPolicyOnFailure:
		return p.ExitCode() == 0
	}
	return false
}

// refuse lets no further start happen.
func (c *container) refuse() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.refused = true
}

func (c *container) process() *Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.proc
}

// terminate ends the program within grace, its preStop hook included.
func (c *container) terminate(ctx context.Context, grace time.Duration) {
	p := c.process()
	if p == nil {
		return
	}
	begin := time.Now()
	if c.spec.Lifecycle != nil && c.spec.Lifecycle.PreStop != nil && grace > 0 {
		c.preStop(ctx, p, c.spec.Lifecycle.PreStop, grace)
	}
	p.Stop(max(0, grace-time.Since(begin)))
	c.mu.Lock()
	c.ready, c.started, c.ended = false, false, metav1.Now()
	c.mu.Unlock()
	c.w.wake()
}

func (c *container) preStop(ctx context.Context, p *Process, hook *corev1.LifecycleHandler, grace time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	switch {
	case hook.Sleep != nil:
		select {
		case <-time.After(min(grace, time.Duration(hook.Sleep.Seconds)*time.Second)):
		case <-p.Done():
		}
	case hook.HTTPGet != nil:
		_ = c.httpGet(ctx, hook.HTTPGet)
	case hook.Exec != nil:
		_ = c.exec(ctx, hook.Exec.Command)
	}
}

// setReady is said by the probes of process p.
func (c *container) setReady(ready bool) {
	c.mu.Lock()
	changed := c.ready != ready
	c.ready = ready
	c.mu.Unlock()
	if changed {
		c.w.wake()
	}
}

func (c *container) setStarted() {
	c.mu.Lock()
	c.started = true
	c.mu.Unlock()
	c.w.wake()
}

func (c *container) isStarted() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.started
}

func (c *container) status() corev1.ContainerStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := corev1.ContainerStatus{Name: c.spec.Name, Image: c.spec.Image, ImageID: c.spec.Image, RestartCount: c.restarts}
	if c.last != nil {
		s.LastTerminationState.Terminated = c.last
	}
	switch {
	case c.proc == nil:
		reason := "ContainerCreating"
		if c.problem != "" {
			reason = "CreateContainerError"
		}
		s.State.Waiting = &corev1.ContainerStateWaiting{Reason: reason, Message: c.problem}
	case c.proc.ExitCode() == -1:
		s.State.Running = &corev1.ContainerStateRunning{StartedAt: c.since}
		s.Ready = c.ready && c.started
		started := c.started
		s.Started = &started
	default:
		s.State.Terminated = c.terminated()
		s.Ready = c.init && s.State.Terminated.ExitCode == 0
	}
	return s
}

// terminated describes a process that has ended. c.mu is held.
func (c *container) terminated() *corev1.ContainerStateTerminated {
	t := &corev1.ContainerStateTerminated{ExitCode: int32(c.proc.ExitCode()), Reason: "Completed", StartedAt: c.since, FinishedAt: c.ended}
	if t.ExitCode != 0 {
		t.Reason = "Error"
	}
	return t
}
