package cluster

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"path"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
)

// kubelet is the scheduler and the kubelets of a cluster. Each pod on a node
// has a worker, from when it is seen until it is gone.
type kubelet struct {
	c          *Cluster
	nodes      []*corev1.Node
	secrets    corelisters.SecretLister
	configMaps corelisters.ConfigMapLister

	mu      sync.Mutex // guards the following
	workers map[types.UID]*worker
	nextIP  int
	turn    int // whose turn it is to get a pod
}

// images of every cluster.
func (c *Cluster) image(name string) (Image, error) {
	repository, _, _ := strings.Cut(path.Base(name), "@")
	repository, _, _ = strings.Cut(repository, ":")
	if i, ok := c.opts.Images[repository]; ok {
		return i, nil
	}
	switch repository {
	case "echo-basic":
		return Image{Path: Program("echo-basic")}, nil
	case "coredns":
		return Image{Path: Program("dns")}, nil
	case "inspect":
		return Image{Path: Program("inspect")}, nil
	case "culvert":
		return Image{Path: Program("culvert"), UID: 65532}, nil
	}
	return Image{}, fmt.Errorf("there is no program for image %q", name)
}

// startKubelet registers the nodes and follows pods until ctx ends.
func (c *Cluster) startKubelet(ctx context.Context) error {
	k := &kubelet{c: c, workers: map[types.UID]*worker{}, nextIP: 1 << 8}
	c.kubelet = k
	if err := k.register(ctx); err != nil {
		return err
	}
	factory := informers.NewSharedInformerFactory(c.Client, 0)
	k.secrets = factory.Core().V1().Secrets().Lister()
	k.configMaps = factory.Core().V1().ConfigMaps().Lister()
	pods := factory.Core().V1().Pods().Informer()
	_, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { k.see(ctx, o.(*corev1.Pod)) },
		UpdateFunc: func(_, o any) { k.see(ctx, o.(*corev1.Pod)) },
		DeleteFunc: func(o any) { k.gone(o) },
	})
	if err != nil {
		return err
	}
	refresh := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { k.refresh(o) },
		UpdateFunc: func(_, o any) { k.refresh(o) },
	}
	for _, inf := range []cache.SharedIndexInformer{factory.Core().V1().Secrets().Informer(), factory.Core().V1().ConfigMaps().Informer()} {
		if _, err := inf.AddEventHandler(refresh); err != nil {
			return err
		}
	}
	factory.Start(ctx.Done())
	c.agents.Add(1)
	go func() {
		defer c.agents.Done()
		<-ctx.Done()
		factory.Shutdown()
		for _, w := range k.all() {
			<-w.ended
		}
	}()
	for what, ok := range factory.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return fmt.Errorf("the harness' list of %v doesn't fill", what)
		}
	}
	return nil
}

// register creates the Node objects, ready and with addresses of the sandbox.
func (k *kubelet) register(ctx context.Context) error {
	nodes := k.c.opts.Nodes
	if len(nodes) == 0 {
		nodes = []Node{{}}
	}
	for i, n := range nodes {
		if n.Name == "" {
			n.Name = fmt.Sprintf("node%d", i+1)
		}
		addr, addr6 := nth(k.c.PodCIDR, 2+i), nth(k.c.PodCIDR6, 2+i)
		err := ip(fmt.Sprintf("addr add %s/32 dev %s", addr, k.c.bridge), fmt.Sprintf("addr add %s/128 dev %s nodad", addr6, k.c.bridge))
		if err != nil {
			return err
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: map[string]string{
			corev1.LabelHostname: n.Name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
		}}}
		if n.Zone != "" {
			node.Labels[corev1.LabelTopologyZone] = n.Zone
		}
		maps.Copy(node.Labels, n.Labels)
		if node, err = k.c.Client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating node %s: %w", n.Name, err)
		}
		much := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1000"), corev1.ResourceMemory: resource.MustParse("1Ti"), corev1.ResourcePods: resource.MustParse("10000")}
		node.Status = corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastTransitionTime: metav1.Now(), LastHeartbeatTime: metav1.Now()}},
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: addr.String()},
				{Type: corev1.NodeInternalIP, Address: addr6.String()},
				{Type: corev1.NodeHostName, Address: n.Name},
			},
			Capacity: much, Allocatable: much,
		}
		if node, err = k.c.Client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("making node %s ready: %w", n.Name, err)
		}
		k.nodes = append(k.nodes, node)
	}
	return nil
}

// see binds a pod that has no node, and tells its worker of any other.
func (k *kubelet) see(ctx context.Context, pod *corev1.Pod) {
	if ctx.Err() != nil {
		return
	}
	if pod.Spec.NodeName == "" {
		if pod.DeletionTimestamp == nil && len(pod.Spec.SchedulingGates) == 0 {
			k.bind(ctx, pod)
		}
		return
	}
	if !slices.ContainsFunc(k.nodes, func(n *corev1.Node) bool { return n.Name == pod.Spec.NodeName }) {
		return
	}
	k.mu.Lock()
	w := k.workers[pod.UID]
	if w == nil {
		w = newWorker(k, pod)
		k.workers[pod.UID] = w
		go w.run(ctx)
	}
	k.mu.Unlock()
	w.see(pod)
}

// bind gives a pod to the next node that its selectors allow. A failure to do
// so is tried again, for nobody else will see the pod again.
func (k *kubelet) bind(ctx context.Context, pod *corev1.Pod) {
	var fit []*corev1.Node
	for _, n := range k.nodes {
		if allowed(pod, n) {
			fit = append(fit, n)
		}
	}
	if len(fit) == 0 {
		return // stays pending, as it would
	}
	k.mu.Lock()
	node := fit[k.turn%len(fit)]
	k.turn++
	k.mu.Unlock()
	binding := &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node.Name},
	}
	k.c.agents.Add(1)
	go func() {
		defer k.c.agents.Done()
		_ = insist(ctx, func() error {
			err := k.c.Client.CoreV1().Pods(pod.Namespace).Bind(ctx, binding, metav1.CreateOptions{})
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				return nil
			}
			return err
		})
	}()
}

// allowed knows nodeSelector and required affinity to labels and names: what a
// DaemonSet and a test of zones use.
func allowed(pod *corev1.Pod, node *corev1.Node) bool {
	if !labels.SelectorFromSet(pod.Spec.NodeSelector).Matches(labels.Set(node.Labels)) {
		return false
	}
	a := pod.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return true
	}
	return slices.ContainsFunc(a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms, func(term corev1.NodeSelectorTerm) bool {
		fields := labels.Set{"metadata.name": node.Name}
		return matches(term.MatchExpressions, node.Labels) && matches(term.MatchFields, fields)
	})
}

func matches(requirements []corev1.NodeSelectorRequirement, set labels.Set) bool {
	for _, r := range requirements {
		value, there := set[r.Key]
		ok := false
		switch r.Operator {
		case corev1.NodeSelectorOpIn:
			ok = there && slices.Contains(r.Values, value)
		case corev1.NodeSelectorOpNotIn:
			ok = !slices.Contains(r.Values, value)
		case corev1.NodeSelectorOpExists:
			ok = there
		case corev1.NodeSelectorOpDoesNotExist:
			ok = !there
		}
		if !ok {
			return false
		}
	}
	return true
}

// gone ends the worker of a pod that was deleted under it.
func (k *kubelet) gone(o any) {
	if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = d.Obj
	}
	pod, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	k.mu.Lock()
	w := k.workers[pod.UID]
	k.mu.Unlock()
	if w != nil {
		w.vanish()
	}
}

// refresh brings the volumes up to date that a Secret or ConfigMap is in.
func (k *kubelet) refresh(o any) {
	namespace := o.(metav1.Object).GetNamespace()
	for _, w := range k.all() {
		if w.namespace == namespace {
			w.refresh()
		}
	}
}

func (k *kubelet) all() []*worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Values(k.workers))
}

func (k *kubelet) worker(uid types.UID) *worker {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.workers[uid]
}

func (k *kubelet) forget(uid types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.workers, uid)
}

// address gives the next pod its addresses. One that was used before comes
// again only after 64,000 pods.
func (k *kubelet) address() (netip.Addr, netip.Addr) {
	k.mu.Lock()
	defer k.mu.Unlock()
	n := k.nextIP
	k.nextIP++
	if k.nextIP >= 250<<8 {
		k.nextIP = 1 << 8
	}
	return nth(k.c.PodCIDR, n), nth(k.c.PodCIDR6, n)
}

func (k *kubelet) nodeIPs(name string) (addrs []string) {
	for _, n := range k.nodes {
		if n.Name != name {
			continue
		}
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				addrs = append(addrs, a.Address)
			}
		}
	}
	return addrs
}
