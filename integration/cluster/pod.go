package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// worker runs one pod. Its run method is the only one that changes the pod's
// state; all others post.
type worker struct {
	k         *kubelet
	namespace string
	name      string
	dir       string // of the pod's files
	changed   chan struct{}
	unwanted  chan struct{} // closed when the pod was deleted without us
	ended     chan struct{} // closed when nothing of the pod is left

	mu         sync.Mutex // guards the following
	pod        *corev1.Pod
	net        *network
	ips        []string
	volumes    *volumes
	containers []*container
	phase      corev1.PodPhase
	started    metav1.Time
	reason     string // why it waits
	unwantOnce sync.Once
}

func newWorker(k *kubelet, pod *corev1.Pod) *worker {
	return &worker{
		k: k, pod: pod, namespace: pod.Namespace, name: pod.Name,
		dir:      filepath.Join(k.c.scratch(), "pods", string(pod.UID)),
		phase:    corev1.PodPending,
		changed:  make(chan struct{}, 1),
		unwanted: make(chan struct{}),
		ended:    make(chan struct{}),
	}
}

// see posts the newest state of the pod's object.
func (w *worker) see(pod *corev1.Pod) {
	w.mu.Lock()
	w.pod = pod
	w.mu.Unlock()
	w.wake()
}

func (w *worker) vanish() { w.unwantOnce.Do(func() { close(w.unwanted) }) }

// wake lets the status be written again.
func (w *worker) wake() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

func (w *worker) spec() *corev1.Pod {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.pod
}

func (w *worker) network() *network {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.net
}

func (w *worker) refresh() {
	w.mu.Lock()
	v := w.volumes
	w.mu.Unlock()
	if v != nil {
		v.refresh()
	}
}

// run brings the pod up, keeps its status and takes it down.
func (w *worker) run(ctx context.Context) {
	defer close(w.ended)
	defer w.k.forget(w.spec().UID)
	defer w.cleanUp()
	var group sync.WaitGroup
	defer group.Wait()
	// Probes go on while the pod terminates; nothing is started any more.
	probing, stopProbing := context.WithCancel(ctx)
	defer stopProbing()
	up, stopUp := context.WithCancel(ctx)
	defer stopUp()
	broughtUp := make(chan struct{})
	group.Go(func() {
		defer close(broughtUp)
		w.bringUp(up, probing, &group)
	})
	w.keepStatus(ctx)

	stopUp()
	<-broughtUp
	for _, c := range w.list() {
		c.refuse()
	}
	if ctx.Err() != nil {
		w.terminate(ctx, 0)
		return
	}
	grace := time.Duration(0)
	select {
	case <-w.unwanted:
	default:
		if s := w.spec().DeletionGracePeriodSeconds; s != nil {
			grace = time.Duration(*s) * time.Second
		}
	}
	down := make(chan struct{})
	group.Go(func() {
		defer close(down)
		w.terminate(ctx, grace)
	})
	for waiting := true; waiting; {
		select {
		case <-down:
			waiting = false
		case <-ctx.Done():
			w.terminate(ctx, 0)
			return
		case <-w.changed:
			_ = w.writeStatus(ctx)
		}
	}
	stopProbing()
	w.bury(ctx)
}

// bury writes the last status and lets the API server forget the pod.
func (w *worker) bury(ctx context.Context) {
	_ = insist(ctx, func() error { return ignoreGone(w.writeStatus(ctx)) })
	now := int64(0)
	_ = insist(ctx, func() error {
		return ignoreGone(w.k.c.Client.CoreV1().Pods(w.namespace).Delete(ctx, w.name, metav1.DeleteOptions{
			GracePeriodSeconds: &now, Preconditions: metav1.NewUIDPreconditions(string(w.spec().UID)),
		}))
	})
}

func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// insist calls f until it has no error: the API server may be away.
func insist(ctx context.Context, f func() error) error {
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// bringUp gives the pod its network and files and starts its containers.
func (w *worker) bringUp(ctx, probing context.Context, group *sync.WaitGroup) {
	pod := w.spec()
	try := func(what string, f func() error) bool {
		err := insist(ctx, func() error {
			err := f()
			reason := ""
			if err != nil {
				reason = fmt.Sprintf("%s: %v", what, err)
			}
			w.mu.Lock()
			changed := w.reason != reason
			w.reason = reason
			w.mu.Unlock()
			if changed {
				w.wake()
			}
			return err
		})
		return err == nil && ctx.Err() == nil
	}
	if !try("network", func() error { return w.plugIn(pod) }) {
		return
	}
	v := newVolumes(w.k, pod, filepath.Join(w.dir, "volumes"))
	if !try("volumes", func() error { return v.write(ctx) }) {
		return
	}
	w.mu.Lock()
	w.volumes = v
	w.mu.Unlock()
	for i := range pod.Spec.InitContainers {
		c := newContainer(w, &pod.Spec.InitContainers[i], true)
		w.add(c)
		if !try("container "+c.spec.Name, func() error { return c.prepare(v) }) {
			return
		}
		if c.sidecar() {
			group.Go(func() { c.run(ctx, probing) })
		} else if !c.run(ctx, probing) {
			return
		}
	}
	w.mu.Lock()
	w.phase, w.started = corev1.PodRunning, metav1.Now()
	w.mu.Unlock()
	for i := range pod.Spec.Containers {
		c := newContainer(w, &pod.Spec.Containers[i], false)
		w.add(c)
		if !try("container "+c.spec.Name, func() error { return c.prepare(v) }) {
			return
		}
		group.Go(func() { c.run(ctx, probing) })
	}
	w.wake()
}

// plugIn makes the pod's namespace once. A pod of its host's network is in the
// sandbox's.
func (w *worker) plugIn(pod *corev1.Pod) error {
	if pod.Spec.HostNetwork {
		w.mu.Lock()
		w.ips = w.k.nodeIPs(pod.Spec.NodeName)
		w.mu.Unlock()
		return nil
	}
	c := w.k.c
	a, a6 := w.k.address()
	n, err := newNetwork(pod.Name, c.bridge,
		[]netip.Prefix{netip.PrefixFrom(a, c.PodCIDR.Bits()), netip.PrefixFrom(a6, c.PodCIDR6.Bits())},
		[]netip.Prefix{netip.PrefixFrom(nth(c.PodCIDR, 1), 32), netip.PrefixFrom(nth(c.PodCIDR6, 1), 128)})
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.net, w.ips = n, []string{a.String(), a6.String()}
	w.mu.Unlock()
	return nil
}

func (w *worker) add(c *container) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.containers = append(w.containers, c)
}

func (w *worker) list() []*container {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]*container(nil), w.containers...)
}

// terminate ends all containers at once: preStop, SIGTERM, and SIGKILL when
// grace is over.
func (w *worker) terminate(ctx context.Context, grace time.Duration) {
	var group sync.WaitGroup
	for _, c := range w.list() {
		group.Go(func() { c.terminate(ctx, grace) })
	}
	group.Wait()
}

// cleanUp removes what the pod had on this machine.
func (w *worker) cleanUp() {
	for _, c := range w.list() {
		c.unmount()
	}
	w.network().close()
	_ = os.RemoveAll(w.dir)
}

// log is of the container, the first if the name is empty.
func (w *worker) log(name string) string {
	for _, c := range w.list() {
		if p := c.process(); p != nil && (name == "" && !c.init || name == c.spec.Name) {
			return p.Output()
		}
	}
	return ""
}
