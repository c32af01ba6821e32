#!/bin/bash
# The first process of the guest, whose root is the host's, read-only: an NFS server, and two clients in networks of their
# own, so that they share no cache, no connection and no locks. Then the tests.
#   /mnt/n1, /mnt/n2   the export, as node n1 and n2 mount it
#   /mnt/server        the disk that is exported
export PATH=$BIN:/usr/sbin:/usr/bin:/sbin:/bin HOME=/mnt TMPDIR=/mnt/tmp
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t tmpfs run /run; mount -t tmpfs -o size=4G mnt /mnt
mkdir -p /dev/shm /mnt/{tmp,server,n1,n2,host,modules/lib}
mount -t tmpfs shm /dev/shm; mount -t hostfs host /mnt/host -o "$HOST"
mount -t tmpfs nfs /var/lib/nfs; mkdir /var/lib/nfs/{v4recovery,rpc_pipefs}; touch /var/lib/nfs/{etab,rmtab}
echo 1 > /proc/sys/kernel/printk
hostname guest; ip link set lo up
ln -s /usr/lib/uml/modules /mnt/modules/lib/modules
modprobe -d /mnt/modules -a nfsd nfsv4 veth
mount -t nfsd nfsd /proc/fs/nfsd
mkfs.ext4 -q /dev/ubdb; mount /dev/ubdb /mnt/server
echo 10 > /proc/fs/nfsd/nfsv4gracetime; echo 10 > /proc/fs/nfsd/nfsv4leasetime  # seconds; 90 by default
exportfs -o rw,fsid=0,no_root_squash,sync,no_subtree_check '*:/mnt/server'
rpc.mountd --no-nfs-version 3 2> /dev/null; rpc.nfsd -N 3 -V 4.2 4
for i in 1 2; do
    ip netns add n$i; ip link add n$i type veth peer name eth0 netns n$i
    ip addr add 10.0.$i.1/24 dev n$i; ip link set n$i up
    ip -n n$i addr add 10.0.$i.2/24 dev eth0; ip -n n$i link set eth0 up
    ip netns exec n$i sh -c "echo n$i > /sys/fs/nfs/net/nfs_client/identifier"
    nsenter --net=/run/netns/n$i mount -t nfs -o vers=4.2,nosharecache 10.0.$i.1:/ /mnt/n$i
done
cd "$REPO" || exit; export NFS_GUEST=1 PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY=/mnt/tmp/hypothesis
eval "python -m pytest -p no:cacheprovider tests/nfs $(cat /mnt/host/options)"
echo $? > /mnt/host/status
sync
echo o > /proc/sysrq-trigger; sleep 9
